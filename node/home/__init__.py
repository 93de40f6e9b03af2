"""What one node has on its machine: files, settings, processes, a terminal. Knows no run. Lowest
first:

refusals           an errno of the system as its cause and its cure, in words
private_folders  folders that nobody else can enter
last_resort      a refusal of the system in an exception that nobody expected
private_files      files and folders that nobody else can read
other_names        what other tools call settings of training
paths, bandwidth, durations, hours, endpoint, strict_toml   where files lie; quantities, addresses
                   and settings as people write them
memory_use         how much memory this process has
local_settings     ./atoll.toml, used only where it is named or trusted
config             the node's settings
interpreter        the Python of processes that are started: it imports nothing from the current
                   folder
process_title      invites out of the list of processes
site_files         files of a site's own as modules, which spawned workers find as well
own_data           a site's own data, by a function in a file of its own
failures           errors of the node as messages
forks, sockets, lifecycle, private_node, ending   one node a home; a script's; who ends with whom
notify, units, logs   systemd, told and asked; lines of a log
errors_catalogue   the page of every error code
names, short_words   two-word names of peers; peers and spans of time in few words
output             what a command says and where; errors on a screen and as JSON
"""
