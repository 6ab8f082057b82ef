"""Recipes share parts, not copies."""

from itertools import permutations
from pathlib import Path

import pytest

from backstay import recipes

FILES = [Path(recipes.__file__).parent / f"{name}.py" for name in ("sft", "dpo", "kd")]
BLOCK = 4


@pytest.mark.parametrize(("one", "other"), [*permutations(FILES, 2)], ids=lambda path: path.stem)
def test_less_than_a_third_of_a_recipe_is_in_another(one: Path, other: Path) -> None:
    """Lines that stand in a run of four or more which the other file has as well; blank ones do not count."""
    mine, theirs = (
        [line for line in each.read_text().splitlines() if line] for each in (one, other)
    )
    runs = {tuple(theirs[at : at + BLOCK]) for at in range(len(theirs))}
    shared = {
        at + step
        for at in range(len(mine) - BLOCK + 1)
        if tuple(mine[at : at + BLOCK]) in runs
        for step in range(BLOCK)
    }
    assert len(shared) < len(mine) / 3
