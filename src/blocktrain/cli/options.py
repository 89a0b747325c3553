"""Flags several verbs share, and what they resolve to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import torch
import typer

from blocktrain.config import did_you_mean
from blocktrain.errors import DeviceError, RecipeError

SetOption = Annotated[
    list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one recipe value; repeatable.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, or auto for the best one here.")
]
RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe file, or the name of one in recipes/, such as demo.")
]

PACKAGED_RECIPES = Path(__file__).parent.parent / "recipes"
SOURCE_RECIPES = Path(__file__).parents[3] / "recipes"


def find_recipe(name: str) -> Path:
    """A file as given, or a shipped recipe by name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    for folder in (PACKAGED_RECIPES, SOURCE_RECIPES):
        shipped = folder / f"{name.removesuffix('.toml')}.toml"
        if shipped.exists():
            return shipped
    known = sorted({f.stem for folder in (PACKAGED_RECIPES, SOURCE_RECIPES) for f in folder.glob("*.toml")})
    raise RecipeError(
        f"no recipe file {name}, and no shipped recipe of that name{did_you_mean(name, known)} "
        f"({', '.join(known)})"
    )


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device(
            best_device(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
        )
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name) is None:
        raise DeviceError(
            f"device {name!r} does not exist here: expected cpu, cuda, cuda:1, mps or auto; try --device cpu"
        )
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"device {name!r} does not exist here ({reason}); try --device cpu") from None
    return device


def best_device(*, cuda: bool, mps: bool) -> str:
    return "cuda" if cuda else "mps" if mps else "cpu"
