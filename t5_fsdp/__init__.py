"""Fine-tune Hugging Face T5 for summarization with PyTorch Fully Sharded Data Parallel."""

__version__ = "0.1.0"
