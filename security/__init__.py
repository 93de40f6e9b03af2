"""Keys, signatures, and later everything that decides whom and what to trust. Knows neither libp2p
nor trio.

identity    a peer's Ed25519 key, its peer id; sign and verify
key_file    the file of a peer's key
rule_names  what manifests and plans call robust rules; loads nothing heavy
rules/      robust aggregation: one vector from many of which some may be hostile; numbers only
btard/      averaging of gradients in which liars are found, proven and removed; state machines
            without I/O
privacy/    differential privacy: what was spent, which step would pass epsilon, exact noise;
            numbers only
masking/    secure aggregation: a sum of vectors nobody sees; state machines without I/O
"""
