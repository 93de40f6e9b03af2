"""A run, looked at: now, or played again. A process of its own, which reads the event files and
asks the node as any command does. Bottom up:

    view      what is shown: events and status documents folded into one bounded picture; pure
    allowed   what of a run may be shown: in a federated one what `validate --explain` allows
    source    where it comes from: the files and the node of a home, or recorded files played again
    document  the picture as plain values
    frame     the picture as lines of a terminal
    what_if   the planner asked about this run
    opening   a browser sent to the page, its token on no command line
    connections   those to the page that are kept
    server    the picture as a page: loopback, a token, nothing from elsewhere (starlette, uvicorn)
    machine   readings of GPUs and of the energy that processors take, where there are any
    metrics   what a node says of itself, as families for Prometheus
    metrics_server   which are served over HTTP: the one part that runs in the node, if asked for
    static/   the page: HTML, CSS and JavaScript as they are served; uPlot (MIT) for curves
"""
