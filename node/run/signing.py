"""What members sign in a run is signed for this domain."""

DOMAIN = "atoll/run/1"
"""Of votes, proposals and statements."""
