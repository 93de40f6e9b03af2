"""What a run keeps on disk: journal, result bytes, checkpoints.

medium      the file system as storage uses it: the disk, or a simulated one that loses and tears
            what was not synced
frames      length, check, body: what journals and archives of logs are made of
journal     FileJournal: entries, promises and votes, a write-ahead log that survives kill -9 and
            power cuts
results     ResultFiles: a ring of preallocated, mapped files that results are received into
checkpoint  anchor and momentum as safetensors, two generations, verified by their Merkle root
states      StateFiles: the model's layout, and when a checkpoint is written and which is read
entry_results   EntryResults: results by entry, and from which round on all are here
spent       SpentFiles: operations voted in, and how often noise was handed over, never behind
contributions   what was contributed to the newest rounds, and who signed it
run_files   RunFiles: the Storage of one log, tying these together
"""

from .run_files import RunFiles

__all__ = ["RunFiles"]
