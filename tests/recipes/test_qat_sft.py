"""Quantisation-aware runs on two ranks: resumed bit for bit, whichever side of its start they stopped on."""

from pathlib import Path
from typing import Any

import pytest
from sft_runs import Stop, final_state, make_inputs, records, run_sft

from backstay.training.signals import STOPPED


@pytest.mark.parametrize("stopped_after", [2, 5])
def test_a_resumed_run_is_the_untouched_run(stopped_after: int, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        **make_inputs(tmp_path),
        "data.packing": "false",
        "qat.scheme": "int8_dynamic_int4",
        "qat.start_step": 4,
    }
    assert run_sft(tmp_path / "whole", values, ranks=2) == [0, 0]
    stop = Stop(2 * stopped_after)
    assert run_sft(tmp_path / "out", values, ranks=2, stop=stop) == [STOPPED, STOPPED]
    assert run_sft(tmp_path / "out", values, ranks=2) == [0, 0]
    assert records(tmp_path / "out") == records(tmp_path / "whole")
    assert final_state(tmp_path / "out") == final_state(tmp_path / "whole")
