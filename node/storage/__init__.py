"""What a run keeps on disk: journal, result bytes, checkpoints.

frames      length, check, body: what journals and archives of logs are made of
journal     FileJournal: entries, promise and vote; survives kill -9 at any instant
results     ResultFiles: a ring of preallocated, mapped files that results are received into
votes       VoteFiles: free-standing operations with durable votes
checkpoint  anchor and momentum as safetensors, verified by their Merkle root
contributions   what was contributed to the newest rounds, and who signed it
run_files   RunFiles: the Storage of one run, tying these together
"""

from .run_files import RunFiles

__all__ = ["RunFiles"]
