# The program with its packages; PyTorch brings its own CUDA and NCCL, the host the driver.
#
#     docker build -t t5-fsdp .
#     docker run --rm --init --gpus all --ipc=host --ulimit memlock=-1 --stop-timeout 60 \
#       -v /mnt/runs:/mnt/runs -v $PWD/data/wikihow:/workspace/data/wikihow \
#       t5-fsdp make train ARGS="--run_dir /mnt/runs/wikihow-t5-3b"
ARG BASE=nvidia/cuda:12.9.1-base-ubuntu24.04
FROM ${BASE}

# A compiler and Python's headers: for torch.compile.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ make git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY requirements.txt ./
# The stamp of the Makefile: make train takes this .venv as it is.
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir -r requirements.txt \
    && touch .venv/.requirements-installed
ENV PATH=/workspace/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/mnt/runs/.cache/huggingface

COPY . .
CMD ["make", "help"]
