"""What a node says, as text for people: used by the command line and by the page. Lowest first:

alone          what was tried by a node that met nobody, in words
reach_views    how the node is reached, in words
documents      documents of the node as text
event_words    events of a run as lines
live           what `atoll join` shows while it trains
"""
