"""The published models' shapes, against the parameters that they are known to have."""

from __future__ import annotations

import pytest

from t5_fsdp.config import ModelConfig
from t5_fsdp.model.build import build_on_meta, num_parameters
from t5_fsdp.model.known_shapes import known_config, known_models
from t5_fsdp.planning.planned_model import planned_spec

COUNTS = {
    "t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
    "google/flan-t5-xl": 2_849_757_184,
    "google/t5-v1_1-xl": 2_849_757_184,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/mt5-small": 300_176_768,
    "google/mt5-xl": 3_742_619_648,
    "google/byt5-small": 299_637_760,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_models(name: str) -> None:
    spec = planned_spec(ModelConfig(name=name))
    assert num_parameters(build_on_meta(spec)) == COUNTS[name]
    assert spec.own_head == (not name.startswith(("t5", "google-t5")))


def test_options_override_a_known_shape() -> None:
    spec = planned_spec(ModelConfig(name="google/mt5-base", config={"num_layers": 3}))
    assert (spec.config.num_layers, spec.config.num_decoder_layers) == (3, 12)
    assert spec.config.vocab_size == 250112 and spec.own_head


def test_other_names_are_not_known() -> None:
    assert len(known_models()) == len(set(known_models())) == 29
    for name in ("google/t5-small", "google-t5/t5-xl", "t5", "google/umt5-large", "me/t5-small"):
        assert known_config(name) is None
