"""Recipes: what is shipped loads, what is misspelt is named, and what overrules what."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import Recipe, changed_settings, load_recipe, resolve_recipe, with_defaults
from blocktrain.errors import RecipeError
from tests.tiny import tiny_recipe

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SHIPPED = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('name = "mine"\nseed = 3\n[model]\nwidth = 64\nheads = 4\n[training]\nsteps = 10\n')
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert load_recipe(path, environment={}).name == path.stem


def shipped(name: str) -> Recipe:
    return load_recipe(next(path for path in SHIPPED if path.stem == name), environment={})


def test_the_litepaper_recipe_has_the_published_shape() -> None:
    model, objective = shipped("litepaper").model, shipped("litepaper").objective
    assert (model.width, model.feedforward * model.width) == (512, 2048)
    assert (model.blocks, model.layers_per_block) == (3, 4)
    assert (objective.sigma_min, objective.sigma_max, objective.sigma_data) == (1.0, 10.0, 0.5)
    assert (objective.p_mean, objective.p_std, objective.overlap) == (-1.2, 1.2, 0.1)
    assert objective.hint_probability == 1.0


def test_the_wikitext_recipe_is_the_one_the_numbers_are_given_for() -> None:
    recipe = shipped("wikitext-2")
    assert (recipe.model.width, recipe.model.blocks, recipe.model.layers_per_block) == (384, 4, 3)
    assert recipe.training.steps == 1000
    assert recipe.training.batch * recipe.model.context == 32_768


def test_the_wikitext_recipe_has_the_rates_that_its_search_found() -> None:
    training = shipped("wikitext-2").training
    report = json.loads((RESULTS / "gap-wikitext-2.json").read_text(encoding="utf-8"))
    best = {
        side: min((one for one in report["trials"] if one["side"] == side), key=lambda one: one["ce"])
        for side in ("block", "reference")
    }
    pairs = {side: (one["matrix_lr"], one["other_lr"]) for side, one in best.items()}
    assert pairs == {
        "block": (training.matrix_lr, training.other_lr),
        "reference": (training.reference_matrix_lr, training.reference_other_lr),
    }


def test_the_demo_needs_nothing_but_python_itself() -> None:
    recipe = shipped("demo")
    assert recipe.data.corpus == "builtin"
    assert recipe.training.reference


def test_a_flag_overrules_the_environment_which_overrules_the_file(recipe_file: Path) -> None:
    environment = {"BLOCKTRAIN_MODEL_WIDTH": "128", "BLOCKTRAIN_TRAINING_STEPS": "20"}
    assert load_recipe(recipe_file, environment={}).model.width == 64
    assert load_recipe(recipe_file, environment=environment).model.width == 128
    flagged = load_recipe(recipe_file, ["model.width=256"], environment)
    assert (flagged.model.width, flagged.training.steps, flagged.model.heads) == (256, 20, 4)


def test_the_last_of_two_equal_flags_wins(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["seed=1", "seed=2"], {}).seed == 2


def test_the_processes_own_environment_is_read(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTRAIN_SEED", "77")
    monkeypatch.setenv("BLOCKTRAIN_MODEL_LAYERS_PER_BLOCK", "5")
    recipe = load_recipe(recipe_file)
    assert (recipe.seed, recipe.model.layers_per_block) == (77, 5)


def test_variables_of_other_parts_are_left_alone(recipe_file: Path) -> None:
    environment = {"BLOCKTRAIN_HOME": "/x", "BLOCKTRAIN_": "1", "MODEL_WIDTH": "1", "BLOCKTRAIN_MODEL_": "1"}
    assert load_recipe(recipe_file, environment=environment) == load_recipe(recipe_file, environment={})


@pytest.mark.parametrize(
    ("flag", "section", "key", "expected"),
    [
        ("model.width=64", "model", "width", 64),
        ("objective.sigma_max=5", "objective", "sigma_max", 5.0),
        ("objective.sigma_max=5e0", "objective", "sigma_max", 5.0),
        ("training.matrix_lr = 1e-3 ", "training", "matrix_lr", 1e-3),
        ("training.reference=false", "training", "reference", False),
        ("training.compile=none", "training", "compile", None),
        ("training.compile=true", "training", "compile", True),
        ("data.max_bytes=1_000_000", "data", "max_bytes", 1_000_000),
        ("data.max_bytes=None", "data", "max_bytes", None),
        ("model.block_layers=[1, 4]", "model", "block_layers", (1, 4)),
        ("model.block_layers=none", "model", "block_layers", None),
        ("model.mixer=none", "model", "mixer", "none"),
        ('model.mixer="none"', "model", "mixer", "none"),
        ("data.corpus=my texts/a=b.txt", "data", "corpus", "my texts/a=b.txt"),
        ('data.corpus="quoted.txt"', "data", "corpus", "quoted.txt"),
        ("data.corpus=1984", "data", "corpus", "1984"),
        ("data.corpus=2024-01-01", "data", "corpus", "2024-01-01"),
        ("data.corpus=true", "data", "corpus", "true"),
        ("data.corpus=naïve ✓.txt", "data", "corpus", "naïve ✓.txt"),
    ],
)
def test_a_flag_is_read_by_the_type_it_lands_on(flag: str, section: str, key: str, expected: Any) -> None:
    found = getattr(getattr(tiny_recipe(flag), section), key)
    assert found == expected
    assert type(found) is type(expected)


BAD_FLAGS = {
    "model.widht=64": r"unknown recipe key model\.widht; known here: family, width, heads",
    "modle.width=64": r"unknown recipe key modle; known here: name, seed, model",
    "width=64": "unknown recipe key width",
    "model.width=33": r"model\.width \(33\) must be a multiple of twice model\.heads \(2\)",
    "model.heads=5": "must be a multiple of twice",
    "model.heads=32": "must be a multiple of twice",
    "model.width=wide": r"model\.width must be int, found 'wide'",
    "model.width=32.0": r"model\.width must be int, found 32\.0",
    "model.width=true": r"model\.width must be int, found True",
    "model.width=none": r"model\.width must be int, found None",
    "model.width=[32]": r"model\.width must be int",
    "model.width=": r"model\.width must be int",
    "model.width=0": "at least 1",
    "model.width=-32": "at least 1",
    "model.blocks=0": "at least 1",
    "model.context=0": "at least 1",
    "model.layers_per_block=0": "at least 1",
    "model.block_layers=[1]": r"model\.block_layers must have a number for each of the 2 blocks .*, found 1",
    "model.block_layers=1,2": r"model\.block_layers must be a list of integers such as .*, found '1,2'",
    "model.block_layers=[1, true]": "must be a list of integers",
    "model.block_layers=[1, 0]": r"block 1 of model\.block_layers: model\.layers_per_block must",
    "model.block_layers=[1, 100_000_000]": r"block 1 of .*layers_per_block must be at most 4096, found 10{8}",
    "model.blocks=100_000_000": "at most 65536",
    "model.block_heads=[2, 5]": r"block 1 of model\.block_heads: model\.width \(32\) must be a multiple",
    "model.block_widths=[32, 64]": 'set objective.codebook = "own"',
    "model.convolution=-1": "between 0 and 16",
    "model.condition_width=1": "at least 2",
    "model.mixer=mlp": r"model\.mixer must be one of attention, none; found 'mlp'",
    "model=3": "model: expected a table, found 3",
    "model.width.deep=3": r"model\.width\.deep: width is a value, not a section",
    "objective.sigma_min=10": r"objective\.sigma_min \(10\.0\) must be above 0 and below",
    "objective.sigma_min=20": "must be above 0 and below",
    "objective.sigma_min=0": "must be above 0 and below",
    "objective.sigma_max=inf": "finite",
    "objective.sigma_data=nan": "finite",
    "objective.sigma_data=0": "above 0",
    "objective.hint_probability=1.5": "between 0 and 1",
    "objective.kind=composed": "removed: it was 0.039 nats behind",
    "objective.kind=chained": "one of denoise, chain, serial;",
    "training.frozen_host_bytes=0": "at least 1",
    "objective.overlap=1": "at least 0 and below 1, found 1",
    "objective.codebook=learned": "training.order",
    "objective.loss=l2": "one of ce, mse",
    "data.corpus=": "data.corpus is empty",
    "data.valid_fraction=0": "valid_fraction",
    "data.valid_fraction=0.9": "valid_fraction",
    "data.max_bytes=0": "max_bytes",
    "data.own_share=1.5": r"data\.own_share must be between 0 and 1, found 1\.5",
    "data.tokenizer=bpe": "one of byte",
    "training.steps=0": "training.steps must be at least 1",
    "training.batch=0": "training.batch must be at least 1",
    "training.batch=1": "training.batch to 2 or more",
    "training.matrix_lr=0": "above 0",
    "training.matrix_lr=fast": "must be float, found 'fast'",
    "training.other_lr=-1": "above 0",
    "training.reference_matrix_lr=0": "above 0",
    "training.reference_other_lr=-1": "above 0",
    "training.reference_other_lr=0": "above 0",
    "training.clip_norm=0": "above 0",
    "training.final_lr=2": "between 0 and 1",
    "training.warmup_steps=-1": "not be negative",
    "training.weight_decay=-1": "not be negative",
    "training.reference=1": "must be bool, found 1",
    "training.compile=maybe": "must be bool",
    "training.checkpoint_seconds=0": "above 0",
    "evaluation.noise_draws=0": "at least 1",
    "evaluation.batch=0": "at least 1",
    "evaluation.max_bytes=1": "above 1",
    "evaluation.pooling_bytes=1": "at least 2",
    "evaluation.sample_bytes=-1": "not be negative",
    "seed=-1": r"seed must be at least 0 and below 2\^63, found",
    "seed=9223372036854775808": r"seed must be at least 0 and below 2\^63, found",
    "seed=many": "seed must be int",
    "model.width": "expected section.key=value",
    "": "expected section.key=value",
    "=3": "expected section.key=value",
    ".=3": "unknown recipe key",
    "model.=3": "unknown recipe key",
}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_a_bad_value_is_refused_in_one_line(flag: str) -> None:
    with pytest.raises(RecipeError, match=BAD_FLAGS[flag]) as refused:
        tiny_recipe(flag)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [["objective.kind=chain"], ["objective.sweep_probability=0.1", "objective.hint_probability=0.5"]],
)
def test_blocks_that_go_on_from_one_another_do_not_specialise(flags: list[str]) -> None:
    assert tiny_recipe("data.own_share=0.75").data.own_share == 0.75
    with pytest.raises(RecipeError, match=r"data\.own_share = 0\.75 makes blocks that know different texts"):
        tiny_recipe("data.own_share=0.75", *flags)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[model\nwidth = 3", "is not valid TOML"),
        (b"\xff\xfe", "cannot read recipe"),
        (b"[model]\nwidth = 64\nwidth = 32\n", "is not valid TOML"),
        (b"[[model]]\nwidth = 64\n", "model: expected a table"),
        (b"model = 5\n", "model: expected a table"),
        (b"[model]\nwings = 2\n", r"unknown recipe key model\.wings"),
        (b"[model]\nwidth = '64'\n", r"model\.width must be int, found '64'"),
        (b"[objective]\nsigma_min = 5\nsigma_max = 2\n", "sigma_min"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=complaint) as refused:
        load_recipe(path, environment={})
    assert "\n" not in str(refused.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path / "absent.toml", environment={})
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path, environment={})


def test_an_empty_recipe_is_all_defaults() -> None:
    assert resolve_recipe({}) == Recipe()


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**63 - 1),
            "name": st.text(max_size=20),
            "model": st.fixed_dictionaries({"width": st.integers(1, 64).map(lambda n: 12 * n)}),
            "objective": st.fixed_dictionaries({"sigma_max": st.floats(1.1, 1e6)}),
            "data": st.fixed_dictionaries({"max_bytes": st.none() | st.integers(1, 10**12)}),
        }
    )
)
def test_a_recipe_survives_json_and_back(values: dict[str, Any]) -> None:
    recipe = resolve_recipe(values)
    assert resolve_recipe(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_resolving_leaves_its_input_alone() -> None:
    values = {"model": {"width": 64, "heads": 4}}
    resolve_recipe(values, ["model.width=128"])
    assert values == {"model": {"width": 64, "heads": 4}}


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().seed = 1  # type: ignore[misc]


def test_a_recipe_written_before_a_key_existed_is_read_with_its_default() -> None:
    recipe = resolve_recipe({"model": {"blocks": 2}})
    stored = recipe.to_dict()
    del stored["swarm"]["stand_in"]
    assert with_defaults(stored) == recipe.to_dict()
    assert with_defaults({"of": "the future"}) == {"of": "the future"}


def test_settings_that_changed_are_named_and_newer_ones_count_as_their_default() -> None:
    stored = json.loads(json.dumps(Recipe(name="a").to_dict()))
    del stored["swarm"]["run_ahead"]  # stored before this setting existed
    assert changed_settings(stored, Recipe(name="a")) == {}
    stored["training"]["batch"] += 1
    batch = Recipe(name="a").training.batch
    assert changed_settings(stored, Recipe(name="b")) == {
        "name": ("a", "b"),
        "training.batch": (batch + 1, batch),
    }


def test_a_misspelt_variable_is_named(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match="variable BLOCKTRAIN_TRAINING_STEPZ .* did you mean steps"):
        load_recipe(recipe_file, environment={"BLOCKTRAIN_TRAINING_STEPZ": "3"})


def test_none_can_be_said_in_a_file() -> None:
    assert resolve_recipe({"training": {"reference_other_lr": "none"}}).training.reference_other_lr is None
    with pytest.raises(RecipeError, match="must be int"):
        resolve_recipe({"training": {"steps": "none"}})
