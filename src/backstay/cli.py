"""The command line: `backstay train | recipes | config | export`. Nothing heavy is imported before it is needed."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError:  # only the libraries of the extra `cli` are missing: say which, not where
    sys.exit("error: the command line needs typer and rich: pip install 'backstay[cli,train]'")

from backstay.errors import BackstayError
from backstay.recipes import RECIPES, Recipe

BAD_INPUT = 2
app = typer.Typer(
    help="Fine-tune language models with checkpoints that cost milliseconds and resume bit-exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Which recipe; `backstay recipes` lists them.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the file's values.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file; by default the recipe's own.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 1,
) -> None:
    """Run a recipe, or go on with it: the same command again resumes from the newest checkpoint.

    Examples:

        backstay train sft model.path=./SmolLM2 data.train=chats.jsonl out=runs/first

        backstay train sft --nproc 2 --config my.yaml optimizer.lr=1e-5

    Stop it with SIGTERM: it saves and ends with status 143. SIGUSR1 saves and goes on. On several machines, use
    `torchrun ... -m backstay.recipes.sft` with the same arguments.
    """
    found = find_recipe(recipe)
    from backstay.recipes.launch import launch

    arguments = ["--config", str(config or found.config), *(overrides or [])]
    raise typer.Exit(launch(found, arguments, num_ranks=nproc))


@app.command()
def recipes() -> None:
    """List recipes and their configurations."""
    table = Table("recipe", "what it does", "program", "configuration")
    for name, recipe in RECIPES.items():
        table.add_row(name, recipe.about, recipe.module, str(recipe.config))
    Console().print(table)


@app.command()
def config(
    recipe: Annotated[str, typer.Argument(help="Which recipe; `backstay recipes` lists them.")],
    save: Annotated[Path | None, typer.Option(help="Copy it to this file.")] = None,
) -> None:
    """Print a recipe's configuration, every key with its default and a comment, or copy it.

    Example:

        backstay config sft --save my.yaml
    """
    found = find_recipe(recipe)
    if save is None:
        typer.echo(found.config.read_text(), nl=False)
        return
    if save.exists():
        fail(f"{save} exists; name another file")
    try:
        shutil.copyfile(found.config, save)
    except OSError as error:
        fail(f"{save} cannot be written: {error.strerror}")
    typer.echo(f"written to {save}; use it with: backstay train {recipe} --config {save}")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint: .../checkpoints/step-00000100.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to be made.")],
    dtype: Annotated[
        str, typer.Option(help="Of floating tensors: same, float32, bfloat16 or float16.")
    ] = "same",
    keep_dtype: Annotated[
        list[str] | None, typer.Option(help="Names of tensors that keep their dtype; may hold *.")
    ] = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Largest file.")] = 5_000_000_000,
    companions: Annotated[
        Path | None,
        typer.Option(help="Directory with config.json and tokenizer; by default the run's own."),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model, which stock transformers loads.

    Example:

        backstay export runs/first/checkpoints/step-00000100 ./my-model --dtype bfloat16
    """
    from backstay.interop.hf import ExportOptions, export_checkpoint

    try:
        options = ExportOptions(
            dtype=dtype, keep_dtype=tuple(keep_dtype or ()), max_shard_bytes=max_shard_bytes
        )
        path = export_checkpoint(checkpoint, out, companions=companions, options=options)
    except (BackstayError, OSError) as error:
        fail(str(error))
    typer.echo(f"exported to {path}")


def find_recipe(name: str) -> Recipe:
    """A recipe by name; ends the program if there is none."""
    if name not in RECIPES:
        fail(f"there is no recipe {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]


def fail(text: str) -> None:
    """End the program because of its input."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(BAD_INPUT)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
