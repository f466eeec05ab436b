"""The same training under Lightning's Trainer: model, loss, batches, schedule and ROUGE.

    data = SummarizationData(config)
    trainer = lightning.Trainer(max_steps=data.num_steps(), strategy="fsdp", ...)
    trainer.fit(SummarizationModule(config), datamodule=data)

What differs between Lightning's batches and this program's: here a step is one global batch, whose
micro-batches are as many as its lengths need, and its loss is the sum over them, and over ranks,
divided by the real target tokens of the whole. So a batch of Lightning's is one micro-batch, and
before each the module says, by `trainer.accumulate_grad_batches`, whether a step ends with it. With
that Lightning's own optimization does the rest: `global_step` counts optimizer steps, and
strategies, precision, loggers, callbacks and checkpoints work as they do with any module. How often
gradients are reduced is the strategy's: once a step under DDP, after every micro-batch under FSDP.
See docs/lightning.md for what does not work.

    checks         what is refused before a fit, all at once
    data           the batches
    sharded_model  the model with its loss, sharded where the strategy leaves that to us
    scoring        ROUGE of the examples that a validation has seen
    checkpoint     what a checkpoint of Lightning's says of its run
    module         the training itself
"""

from t5_fsdp.errors import UserError

try:
    import lightning.pytorch  # noqa: F401
except ImportError:
    raise UserError(
        "t5_fsdp.integrations.lightning needs the package lightning; pip install lightning"
    ) from None

from t5_fsdp.integrations.lightning.data import SummarizationData
from t5_fsdp.integrations.lightning.module import SummarizationModule

__all__ = ["SummarizationData", "SummarizationModule"]
