"""Writing: one export in the process that writes it, from the plan to the published directory.

Guarantees: nothing is visible under the export's name before all of it is durable and was opened again; what fails leaves nothing.
Memory: the tensors of one group, and what comes out of it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from backstay.interop.hf_blueprint import Blueprint
from backstay.interop.hf_companions import (
    copy_companions,
    describe_weights,
    sync_file,
    write_config,
)
from backstay.interop.hf_draft import Draft, check_free
from backstay.interop.hf_file import TensorFiles, verify_files
from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_plan import INDEX_NAME, ExportPlan, Group, Spec, make_plan


class Writing:
    """One export under way.

    Args:
        out: the directory to make.
        blueprint: of the model; what goes beside the weights is copied from where it was made from.
        specs: of all tensors that there are, by all their names.
        aliases: further name -> first name, of tensors that are one.

    Raises:
        InvalidArgument: `out` exists.
        ModelError, StateMismatch, StateError: this model cannot be exported; nothing was written.
        OSError: the draft cannot be made.
    """

    def __init__(
        self,
        out: Path,
        blueprint: Blueprint,
        options: ExportOptions,
        *,
        specs: Mapping[str, Spec],
        aliases: Mapping[str, str],
    ) -> None:
        check_free(out)
        self._blueprint = blueprint
        chosen, self._is_untied = blueprint.choose(specs, aliases)
        self.plan: ExportPlan = make_plan(blueprint.group(chosen), options)
        self._group_of = {name: group for group in self.plan.groups for name in group.sources}
        self._waiting: dict[Group, dict[str, Tensor]] = {}
        self._draft = Draft(out)
        try:
            self._files = TensorFiles(self._draft.path, self.plan)
        except OSError:
            self._draft.discard()
            raise

    @property
    def sources(self) -> list[str]:
        """Names of the tensors that are needed, those of each group in a row."""
        return [name for group in self.plan.groups for name in group.sources]

    def put(self, name: str, tensor: Tensor) -> None:
        """Take the values of one tensor; those of a group are kept until it is complete.

        Raises:
            OSError: they cannot be written.
        """
        group = self._group_of[name]
        if not group.is_converted:
            self._files.write(group.outputs[0][0], tensor)
            return
        members = self._waiting.setdefault(group, {})
        members[name] = tensor
        if len(members) < len(group.sources):
            return
        del self._waiting[group]
        for output, values in self._blueprint.convert(members).items():
            self._files.write(output, values)

    def finish(self) -> None:
        """Write what goes beside the weights, open everything again, and publish.

        Raises:
            ExportFailed: a file is not what was planned.
            OSError: a file cannot be read or written.
        """
        self._files.check_complete()
        folder = self._draft.path
        if self.plan.index is not None:
            (folder / INDEX_NAME).write_bytes(self.plan.index)
            sync_file(folder / INDEX_NAME)
        copy_companions(self._blueprint.source, folder)
        fields = describe_weights(
            self._blueprint.fields,
            [slot.spec for slot in self.plan.slots.values()],
            architecture=self._blueprint.architecture,
            is_untied=self._is_untied,
        )
        write_config(folder, fields)
        verify_files(folder, self.plan)
        self._draft.publish()

    def discard(self) -> None:
        """Remove what is there of an export that was not finished."""
        self._files.close()
        self._draft.discard()


def absolute(path: str | os.PathLike[str]) -> Path:
    """An absolute path without a slash at its end."""
    return Path(os.path.abspath(path))
