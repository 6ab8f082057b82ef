"""Blueprint: what transformers knows of an architecture: names, shapes, ties, and how stored names differ from those in memory.

The model is built on the meta device from `config.json`, so it costs no memory. Names are converted by the rules that
`transformers.core_model_loading.revert_weight_conversion` applies in `save_pretrained` to a model that was not loaded; rules that need
several tensors at once get exactly those. That the stock loader takes what comes out is tried on the meta device before anything is written.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    revert_weight_conversion,
)
from transformers.utils import logging as transformers_logging

from backstay.errors import ModelError, StateMismatch
from backstay.interop.hf_companions import read_fields
from backstay.interop.hf_plan import Group, Spec

MAX_LINES = 20


class Blueprint:
    """An architecture without weights.

    Args:
        companions: directory with `config.json`.

    Raises:
        ModelError: transformers cannot build it, or it is quantised.
    """

    def __init__(self, companions: Path) -> None:
        self.source = companions
        self.fields = read_fields(companions)
        if self.fields.get("quantization_config"):
            raise ModelError(
                f"{companions / 'config.json'}: quantised models cannot be exported; remove quantization_config if the weights are plain"
            )
        self.model = build(companions, self.fields)
        self.specs = {
            name: spec_of(tensor)
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }
        # Further name -> the name that is stored, as far as the configuration ties them.
        self.tied: dict[str, str] = dict(self.model.all_tied_weights_keys or {})

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self.model).__name__

    def choose(
        self, specs: Mapping[str, Spec], aliases: Mapping[str, str]
    ) -> tuple[dict[str, Spec], bool]:
        """Which tensors are written, in the model's order.

        Args:
            specs: all tensors that there are, under all their names.
            aliases: further name -> first name, of tensors that are one.

        Returns:
            Name -> spec, and whether tensors are written that the configuration would tie.

        Raises:
            StateMismatch: names or shapes are not those of the architecture.
        """
        chosen: dict[str, Spec] = {}
        is_untied = False
        problems = [f"{name}: unexpected" for name in specs if name not in self.specs]
        for name, expected in self.specs.items():
            source = self.tied.get(name)
            if source in specs and (name not in specs or is_same(name, source, aliases)):
                continue
            if name not in specs:
                problems.append(f"{name}: missing")
            elif specs[name].shape != expected.shape:
                problems.append(f"{name}: shape {specs[name].shape}, expected {expected.shape}")
            else:
                is_untied = is_untied or source is not None
                chosen[name] = specs[name]
        self._raise_mismatch(problems)
        ignored = {*(self.model._keys_to_ignore_on_save or ())}
        return {name: spec for name, spec in chosen.items() if name not in ignored}, is_untied

    def group(self, specs: Mapping[str, Spec]) -> list[Group]:
        """What is converted together, and what comes out.

        Raises:
            ModelError: transformers has no way back to the stored names, or would not load them.
        """
        try:
            groups = self._group(specs)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{self.source}: transformers cannot convert the names of {self.architecture} back: {first_line(error)}"
            ) from error
        self._check_loads({name: spec for group in groups for name, spec in group.outputs})
        return groups

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one group, or of all, as they are stored."""
        return dict(revert_weight_conversion(self.model, tensors))

    def _group(self, specs: Mapping[str, Spec]) -> list[Group]:
        converters, renamings = self._rules()
        members: dict[str, list[str]] = {}
        plain: dict[str, str] = {}
        for name in specs:
            target, pattern = apply_converters(name, converters)
            if pattern is None:
                plain[name] = apply_renamings(name, renamings)
            else:
                members.setdefault(target, []).append(name)
        together = {sources[0]: sources for sources in members.values()}
        groups = []
        for name, spec in specs.items():
            if name in plain:
                groups.append(Group((name,), ((plain[name], spec),)))
            elif name in together:
                sources = together[name]
                outputs = self._convert_specs({each: specs[each] for each in sources})
                groups.append(Group(tuple(sources), tuple(outputs.items()), is_converted=True))
        self._check_groups(groups, specs)
        return groups

    def _rules(self) -> tuple[list[Any], list[Any]]:
        """Converters and renamings on the way out; a prefix that may or may not have been there is left alone, as in the library."""
        rules = get_model_conversion_mapping(self.model, add_legacy=False)
        backwards = [
            rule.reverse_transform() for rule in rules[::-1] if not isinstance(rule, PrefixChange)
        ]
        converters = [rule for rule in backwards if isinstance(rule, WeightConverter)]
        return converters, [rule for rule in backwards if isinstance(rule, WeightRenaming)]

    def _convert_specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        tensors = {name: meta_tensor(spec) for name, spec in specs.items()}
        return {name: spec_of(tensor) for name, tensor in self.convert(tensors).items()}

    def _check_groups(self, groups: list[Group], specs: Mapping[str, Spec]) -> None:
        """See that group by group gives what all at once gives."""
        found = {name: spec for group in groups for name, spec in group.outputs}
        expected = self._convert_specs(specs)
        if found != expected:
            differing = sorted({*found} ^ {*expected}) or sorted(
                name for name in found if found[name] != expected[name]
            )
            raise ModelError(
                f"{self.source}: {self.architecture} needs more tensors at once for {', '.join(differing[:5])}; use its save_pretrained"
            )

    def _check_loads(self, outputs: Mapping[str, Spec]) -> None:
        """Let the stock loader take names and shapes, without values."""
        tensors = {name: meta_tensor(spec) for name, spec in outputs.items()}
        cls: Any = type(self.model)
        try:
            with no_progress_bar():
                _, report = cls.from_pretrained(
                    None,
                    config=self.model.config,
                    state_dict=tensors,
                    device_map="meta",
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError, KeyError, TypeError, ImportError, OSError) as error:
            raise ModelError(
                f"{self.source}: transformers would not load the export: {first_line(error)}"
            ) from error
        ignored = {*(self.model._keys_to_ignore_on_save or ())}
        problems = [f"{name}: missing" for name in report["missing_keys"] if name not in ignored]
        problems += [f"{name}: unexpected" for name in report["unexpected_keys"]]
        problems += [f"{each}: another shape" for each in report["mismatched_keys"]]
        if problems:
            raise ModelError(
                f"{self.source}: transformers would not find all weights of {self.architecture} in the export\n{shorten(problems)}"
            )

    def _raise_mismatch(self, problems: list[str]) -> None:
        if problems:
            raise StateMismatch(
                f"the weights are not those of {self.architecture} as {self.source / 'config.json'} describes it, in "
                f"{len(problems)} places; nothing was written. Export the bare model (adapters merged) with its own configuration\n"
                + shorten(problems)
            )


def build(companions: Path, fields: dict[str, Any]) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        config = AutoConfig.from_pretrained(companions)
        with torch.device("meta"):
            return instantiate(config, fields)
    except (ValueError, KeyError, OSError, TypeError, ImportError, AssertionError) as error:
        raise ModelError(
            f"{companions / 'config.json'}: transformers cannot build the model: {first_line(error)}"
        ) from error


def instantiate(config: PreTrainedConfig, fields: dict[str, Any]) -> PreTrainedModel:
    """The class that the configuration names, or else the causal LM of its model type."""
    named = str((fields.get("architectures") or [""])[0]).removeprefix("FSDP")
    cls = getattr(transformers, named, None)
    # The attention of a GPU may not be installed here, and has no weights.
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls._from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


def is_same(name: str, other: str | None, aliases: Mapping[str, str]) -> bool:
    """Whether two names are of one tensor."""
    return aliases.get(name, name) == aliases.get(other or "", other)


def meta_tensor(spec: Spec) -> Tensor:
    """A tensor without values."""
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def spec_of(tensor: Tensor) -> Spec:
    """Dtype and global shape."""
    return Spec(tensor.dtype, tuple(tensor.shape))


def shorten(problems: list[str]) -> str:
    """Some lines, however many there are."""
    rest = len(problems) - MAX_LINES
    return "\n".join([*problems[:MAX_LINES], *([f"and {rest} more"] if rest > 0 else [])])


def first_line(error: BaseException) -> str:
    """The gist of a library's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep the library from drawing on stderr."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
