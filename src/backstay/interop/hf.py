"""Hugging Face directories from live models and from checkpoints: what stock `from_pretrained` opens. START HERE.

    save_companions(out / "companions", config=config, tokenizer=tokenizer)     # once per run
    export_model(model, out / "final", companions=out / "companions", ranks=ranks)       # now, all ranks together
    export_checkpoint(out / "checkpoints/step-00000100", "my-model")                     # later, one process
    exporter = Exporter(out / "export", companions=out / "companions")                   # while training goes on
    exporter.start(out / "checkpoints/step-00000100", 100)

All three write the same bytes for the same weights: one tensor after another, straight to its place in the file. An export exists under its
name only when it is complete, durable, and has been opened again; it is never overwritten.

Names are those that the stock loader expects. transformers 5 stores some architectures otherwise than it holds them in memory (experts of a
mixture, for example): `hf_blueprint` converts with the library's own rules, tensor by tensor where the rules allow it. Before anything is
written, the library loads the planned names and shapes on the meta device; what does not fit is refused. Quantised models are refused, too.
"""

from backstay.interop.hf_checkpoint import export_checkpoint
from backstay.interop.hf_companions import save_companions
from backstay.interop.hf_exporter import Exporter
from backstay.interop.hf_model import export_model
from backstay.interop.hf_options import ExportOptions

__all__ = ["ExportOptions", "Exporter", "export_checkpoint", "export_model", "save_companions"]
