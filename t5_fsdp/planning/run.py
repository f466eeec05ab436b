"""What a plan is about: a model, the sections of a configuration that matter, and the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from t5_fsdp.config import DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from t5_fsdp.data.batch_division import round_up
from t5_fsdp.distributed import World
from t5_fsdp.model.activations import ActivationOptions, MicroBatchShape
from t5_fsdp.model.build import ModelSpec, build_on_meta
from t5_fsdp.model.flops import T5Shape
from t5_fsdp.model.loss import LossOptions
from t5_fsdp.parallel.common import DTYPES
from t5_fsdp.parallel.mesh import num_shards
from t5_fsdp.planning.model_sizes import ModelSizes


@dataclass(frozen=True)
class PlannedRun:
    """One run as the closed forms see it; `dataclasses.replace` makes its variations.

    Attributes:
        spec: the model.
        sizes: its parameters.
        attention: `model.attention`.
        width_multiple: see `config.width_multiple`.
        world: how many ranks, on how many nodes; its device says whether they are GPUs.
    """

    spec: ModelSpec
    sizes: ModelSizes
    attention: str
    data: DataConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    width_multiple: int
    world: World

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        attention: str,
        *,
        data: DataConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        train: TrainConfig,
        width_multiple: int,
        world: World,
    ) -> PlannedRun:
        """With the sizes of the model, which is built without memory for them."""
        sizes = ModelSizes.of(build_on_meta(spec, attention), parallel)
        return cls(spec, sizes, attention, data, parallel, optimizer, train, width_multiple, world)

    @property
    def shape(self) -> T5Shape:
        """The model's dimensions."""
        return T5Shape.of(self.spec.config, frozen=self.spec.adapter is not None)

    @property
    def itemsize(self) -> int:
        """Bytes of a number of forward and backward."""
        return DTYPES[self.parallel.param_dtype].itemsize

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of a number of the gradient reduction."""
        return DTYPES[self.parallel.reduce_dtype].itemsize

    @property
    def num_shards(self) -> int:
        """Ranks that share a copy of the model."""
        return num_shards(self.parallel, self.world)

    @property
    def uses_autocast(self) -> bool:
        """Whether weights stay float32 and are cast as they are used."""
        alone = self.parallel.engine == "fsdp1" and self.world.world_size == 1
        return (self.parallel.engine == "ddp" or alone) and self.itemsize < 4

    @property
    def longest(self) -> tuple[int, int]:
        """Widths of the longest source and target that the data section allows."""
        data, multiple = self.data, self.width_multiple
        return (
            round_up(data.max_source_tokens, multiple),
            round_up(data.max_target_tokens, multiple),
        )

    def with_longest(self, source: int, target: int) -> PlannedRun:
        """The same on data whose longest source and target are known."""
        data = replace(self.data, max_source_tokens=source, max_target_tokens=target)
        return replace(self, data=data)

    @property
    def examples_a_rank(self) -> int:
        """Examples of a step on the rank that has most."""
        return -(-self.train.global_batch_size // self.world.world_size)

    def micro_batch(self, source: int, target: int) -> MicroBatchShape:
        """The largest micro-batch of examples that are all of these lengths.

        Not only `micro_batch_tokens` limits it: the padded tokens of a step are divided evenly, so
        no rank gets more than its share of a step whose examples are all the longest.
        """
        share = self.examples_a_rank * sum(self.longest)
        budget = min(self.train.micro_batch_tokens, share)
        return MicroBatchShape(max(1, budget // (source + target)), source, target)

    def worst_micro_batches(self) -> list[MicroBatchShape]:
        """Shapes of which one needs most memory, if no target is longer than its source.

        The longest examples; the longest sources with next to no target; and sources as short as
        the longest target.
        """
        source, target = self.longest
        short = min(source, target)
        corners = {(source, target), (source, self.width_multiple), (short, short)}
        return [self.micro_batch(*corner) for corner in sorted(corners, reverse=True)]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step of the longest examples."""
        return -(-self.examples_a_rank // self.micro_batch(*self.longest).rows)

    def activation_options(self) -> ActivationOptions:
        """What decides about activations besides the shapes."""
        parallel = self.parallel
        return ActivationOptions(
            itemsize=self.itemsize,
            autocast=self.uses_autocast,
            on_gpu=self.world.device.type == "cuda",
            attention=self.attention,  # type: ignore[arg-type]
            dropout=getattr(self.spec.config, "dropout_rate", 0.1) > 0,
            checkpointing=parallel.activation_checkpointing,
            stack=parallel.activation_checkpointing_stack,
            every=parallel.activation_checkpointing_every,
        )

    def loss_rows(self, targets: int) -> int:
        """Target tokens whose logits are computed together."""
        rows = LossOptions.of(self.train).rows_at_a_time(self.shape.vocab)
        return min(rows, targets)
