"""Configurations: frozen dataclasses filled from YAML and `dotted.key=value`, and compared between a run and its resumption.

Pure but for reading one file. Parsing and types are OmegaConf's; what is here turns its errors into ones that name the nearest right key.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from backstay.errors import ConfigError, InvalidArgument

__all__ = [
    "MISSING",
    "Change",
    "check_counts",
    "compare",
    "fixed",
    "keys_of",
    "load_config",
    "to_plain",
    "to_yaml",
]

C = TypeVar("C")
FIXED = "fixed"


def fixed(default: Any) -> Any:
    """A field that a resumed run must not change: the result would be neither of the two runs."""
    return dataclasses.field(default=default, metadata={FIXED: True})


def check_counts(section: str, config: object, *names: str) -> None:
    """See that some fields of a section are null or at least 1.

    Raises:
        ConfigError: one of them is not.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{section}.{name}={value}: expected a number >= 1")


@dataclass(frozen=True)
class Change:
    """One key that differs between the configuration in a checkpoint and the present one."""

    key: str
    before: object
    now: object
    is_fixed: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"


def load_config(schema: type[C], *, file: Path | None = None, overrides: Sequence[str] = ()) -> C:
    """A configuration from defaults, then a YAML file, then `dotted.key=value` overrides.

    Raises:
        ConfigError: unknown key (with the nearest right one), ill-typed or missing value, unreadable file.
    """
    merged = OmegaConf.structured(schema)
    OmegaConf.set_readonly(merged, False)
    layers = [(str(file), read_yaml(file))] if file is not None else []
    layers += [(text, parse_override(text)) for text in overrides]
    for source, layer in layers:
        merged = merge(schema, merged, layer, source)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: no value given; set it in the configuration file or as {missing[0]}=..."
        )
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as plain dicts, lists and values."""
    return OmegaConf.to_container(OmegaConf.structured(config))  # type: ignore[return-value]


def to_yaml(config: Any) -> str:
    """A configuration as YAML, every key written out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def keys_of(schema: type) -> list[str]:
    """All dotted keys, sections included."""
    return [key for key, _ in _walk(schema)]


def compare(schema: type, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The keys that differ, in the order of the schema; keys that one side lacks are those of another version and count as changed."""
    changes = []
    for key, field in _walk(schema):
        if dataclasses.is_dataclass(field.type):
            continue
        old, new = _get(before, key), _get(now, key)
        if old != new:
            changes.append(Change(key, old, new, bool(field.metadata.get(FIXED))))
    return changes


def read_yaml(file: Path) -> DictConfig:
    """The content of a YAML file.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        found = OmegaConf.load(file)
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as a YAML file: {error}") from error
    if not isinstance(found, DictConfig):
        raise ConfigError(f"{file}: expected keys and values, found a {type(found).__name__}")
    return found


def parse_override(text: str) -> DictConfig:
    """One `dotted.key=value`."""
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r}: expected dotted.key=value, for example optimizer.lr=1e-5")
    try:
        return OmegaConf.from_dotlist([text])
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{text!r}: the value cannot be read as YAML: {error}") from error


def merge(schema: type, merged: DictConfig, layer: DictConfig, source: str) -> DictConfig:
    """Put a layer over what is there."""
    try:
        return OmegaConf.merge(merged, wrap_singles(schema, layer))  # type: ignore[return-value]
    except InvalidArgument as error:
        raise ConfigError(f"{source}: {error}") from error
    except ConfigKeyError as error:
        raise ConfigError(describe_unknown(schema, layer, source)) from error
    except (OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None) or "the value"
        reason = str(getattr(error, "msg", None) or error).splitlines()[0]
        raise ConfigError(f"{source}: {key}: {reason}") from error


def wrap_singles(schema: type, layer: DictConfig) -> DictConfig:
    """Where a tuple is expected and a single text stands, take it for a tuple of one."""
    tuples = [key for key, field in _walk(schema) if str(field.type).startswith("tuple[str")]
    for key in tuples:
        value = OmegaConf.select(layer, key)
        if isinstance(value, str):
            OmegaConf.update(layer, key, [value])
    return layer


def describe_unknown(schema: type, layer: DictConfig, source: str) -> str:
    """Name the keys that do not exist, each with the nearest that does."""
    known = keys_of(schema)
    free = tuple(
        f"{key}." for key, field in _walk(schema) if str(field.type).startswith(("dict", "Dict"))
    )
    lines = []
    for key in _keys_in(layer):
        if key not in known and not key.startswith(free):
            by_leaf = [each for each in known if each.split(".")[-1] == key.split(".")[-1]]
            near = by_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            lines.append(f"{source}: there is no key {key!r}{hint}")
    return "\n".join(lines) or f"{source}: unknown key"


def _walk(schema: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for field in dataclasses.fields(schema):
        key = f"{prefix}{field.name}"
        yield key, field
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            yield from _walk(field.type, f"{key}.")


def _keys_in(layer: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in layer:
        key = f"{prefix}{name!s}"
        value = layer._get_node(name)
        if isinstance(value, DictConfig) and len(value):
            yield from _keys_in(value, f"{key}.")
        else:
            yield key


def _get(values: Mapping[str, Any], key: str) -> object:
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return list(found) if isinstance(found, tuple) else found
