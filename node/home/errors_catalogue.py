"""The page of every error code: what ``atoll explain E110`` prints. A test compares the codes with
those the source raises.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorPage(NamedTuple):
    """One code: a stable slug, one line, the exit status, and what to know and type."""

    slug: str
    title: str
    exit_code: int
    text: str


PAGES: dict[str, ErrorPage] = {
    "E000": ErrorPage(
        "defect",
        "something failed that atoll did not expect",
        1,
        """\
This is a defect of atoll, not of your set-up: what the system refuses is E501 or E502. Nothing
that was committed is lost: anchor, momentum and journal are written atomically. Run the same
command with -vv to see where it happened, and report that text together with
`atoll version --json`.""",
    ),
    "E001": ErrorPage(
        "preflight",
        "something that must be compiled cannot be compiled here",
        69,
        """\
libp2p depends on fastecdsa 2.3.2, which has no ready-made wheel for Linux. The lock in scripts/
takes 3.0.1, which has them for x86-64 and Python 3.11 to 3.13. Elsewhere a C compiler, the Python
headers and libgmp are needed while installing, and everywhere Python's module venv.

    Debian, Ubuntu    sudo apt install build-essential python3-dev python3-venv libgmp-dev
    Fedora            sudo dnf install gcc python3-devel gmp-devel
    macOS             xcode-select --install; brew install python gmp""",
    ),
    "E002": ErrorPage(
        "usage",
        "the command line is not understood",
        2,
        """\
The message names the option or argument. `atoll COMMAND --help` shows what a command takes.""",
    ),
    "E003": ErrorPage(
        "not-running",
        "no node of yours is running",
        3,
        """\
Commands such as status, peers and leave ask the running node through a socket in your runtime
folder.

    atoll up                   run the node here
    atoll up --background      run it behind you
    atoll config path          which folders are in use: each --home or ATOLL_HOME has its own""",
    ),
    "E100": ErrorPage(
        "network",
        "the network failed",
        69,
        """\
A connection could not be made or broke. Training goes on alone; the node tries again by itself.
When it lasts, look at `atoll peers` to see who is reached and how, and at the firewall of this
machine.""",
    ),
    "E101": ErrorPage(
        "port-in-use",
        "the port to listen on is taken",
        73,
        """Another program listens there, most often another node of yours.

    atoll status                          is it yours? Use it; one node serves all runs
    atoll up --port 0 --home ./node2      a second node with its own key and any free port
    atoll config set node.port 4160       another port for good""",
    ),
    "E102": ErrorPage(
        "node-running",
        "this home has its node already",
        73,
        """\
One folder is one node with one key. A script that found no running node may have started a
private one, which belongs to it alone and ends with it.

    atoll status                     the node that runs
    atoll up --background            a node for all your scripts, once the private one has ended
    atoll up --home ./node2          a second node with a key of its own""",
    ),
    "E110": ErrorPage(
        "no-bootstrap",
        "no peer could be reached",
        69,
        """\
None of the addresses answered. This is not a ban and your key is fine: do not delete it. The
addresses may be old, their machines off, or a firewall may be in between. The node goes on
trying with growing pauses and remembers every peer it ever reached.

    atoll netcheck                       what was tried, how each try ended, and what that means
    atoll peers                          who is reached now
    atoll invite inspect INVITE          which addresses an invite carries
    atoll up --bootstrap ADDRESS         try another way in
Any member can print an invite with fresh addresses: atoll invite new""",
    ),
    "E111": ErrorPage(
        "peer-lost",
        "a peer fell silent",
        69,
        """\
Neither we nor two other members got an answer from it. Its contribution to the open round is
left out by name, its part goes to others, and the round is decided without it. There is nothing
to do; it re-enters when it comes back.""",
    ),
    "E112": ErrorPage(
        "deadline",
        "something took longer than its deadline",
        75,
        """\
No wait in atoll is for ever; this one ended. Deadlines follow from measured rates, so a link
that suddenly became slow is the usual cause. Trying again is safe.""",
    ),
    "E113": ErrorPage(
        "nobody-home",
        "no member of the run answered",
        69,
        """\
The network is reached, but nobody who knows this run is online, so its manifest cannot be
fetched. A run lives as long as one of its members' nodes does. After `atoll new` a run exists
on paper only, until somebody's node serves it.

    atoll up             on the organiser's machine: its node serves the runs it knows
    atoll join RUN       there, too, after `atoll new`: the first one who trains founds the run""",
    ),
    "E120": ErrorPage(
        "clock",
        "this machine's clock is wrong",
        75,
        """\
Signed records carry the time and end by themselves; with a wrong clock the others refuse ours
and we refuse theirs.

    sudo timedatectl set-ntp true""",
    ),
    "E130": ErrorPage(
        "unreachable",
        "nobody can dial this node, and no relay takes it",
        69,
        """\
This machine is behind a router that lets nothing in, and none of the public peers it met holds
a place for it. It still dials others, so it can train with members that can be dialled. Any one
of these mends it:

    forward the TCP port of `atoll status` on the router to this machine, then: atoll netcheck
    ask somebody with a public address to run: atoll relay
    and start with: atoll up --bootstrap ADDRESS
A relay that answers “relays only for peers of runs it knows” knows this node as soon as it has
joined one of its runs.""",
    ),
    "E140": ErrorPage(
        "version",
        "no protocol version in common",
        76,
        """\
The other side speaks another version of the protocol. It sits out; the others go on. If it is
you:

    pip install -U atoll
    atoll down && atoll up""",
    ),
    "E141": ErrorPage(
        "remote-protocol",
        "a peer sent something that breaks the protocol",
        76,
        """\
The bytes were refused before they had any effect, and it counts against that peer. An old or
foreign program on its side is the usual cause. There is nothing to do here.""",
    ),
    "E142": ErrorPage(
        "local-protocol",
        "atoll was used, or behaved, against its own rules",
        70,
        """\
From a script: a call out of order, such as a second contribution while one is undecided; the
message names it. Otherwise a defect of atoll: report it with the text that -vv shows.""",
    ),
    "E150": ErrorPage(
        "group",
        "the group for an operation cannot be formed",
        75,
        """\
Not enough members agreed to take part in time. Training goes on; the next round tries again.""",
    ),
    "E151": ErrorPage(
        "not-enough-peers",
        "fewer peers than asked for",
        75,
        """\
A commit needs more than half of the members of the last committed round, or exactly half with
the organiser. In a smaller part of a divided network you train on alone and wait; what you
learned meanwhile is contributed when the others are back.

    atoll peers          who is there""",
    ),
    "E160": ErrorPage(
        "closed",
        "the connection to the node is closed",
        1,
        """\
The script called close(), or its node ended. Training can go on alone. `atoll up` starts the
node again; the script enters the run again at the next synchronisation.""",
    ),
    "E161": ErrorPage(
        "no-node",
        "a node could not be started",
        1,
        """\
The node process ended, or was not ready in time. The message quotes its last words and names
its log. Often: the disk is full, the port is taken, or libp2p is not installed as it should be.

    atoll up             run it in the foreground and see""",
    ),
    "E162": ErrorPage(
        "left",
        "this node has left the run",
        1,
        """\
Somebody typed `atoll leave`. It stays left, over restarts of the node too, until somebody joins
again. A script that trains in it goes on alone; it is back in the run by itself once the node
is.

    atoll join RUN       its id, the beginning of it, or its name""",
    ),
    "E200": ErrorPage(
        "security",
        "something could not be trusted",
        77,
        """\
A check of a key, a signature or a permission failed; the message says which. Nothing was
accepted.""",
    ),
    "E201": ErrorPage(
        "not-admitted",
        "the invite does not open this run",
        77,
        """\
It was cut or mistyped, has expired, was revoked, is for one peer or for so many that have
entered already, or belongs to another run. Invites end by themselves so that a leaked one does
not stay open. Your own key is fine.

    atoll invite inspect INVITE       what it says and when it ends
    atoll invite new                  a member types this to make you a new one""",
    ),
    "E202": ErrorPage(
        "bad-signature",
        "a signature does not verify",
        77,
        """\
The bytes were changed after signing, or somebody else signed them. An invite: copy it again,
character by character. A manifest: it is refused; ask the organiser. A record from a peer: it
is dropped and counts against that peer.""",
    ),
    "E203": ErrorPage(
        "misbehaviour",
        "a peer provably misbehaved",
        77,
        """\
It signed two things that cannot both be true. The signed bytes are kept as evidence, the peer
is left out. There is nothing to do.""",
    ),
    "E204": ErrorPage(
        "not-proven",
        "a run's log does not prove itself",
        77,
        """\
Every entry of a log is signed by those who decided it and names the hash of the entry before;
the first is signed by the run's organiser. `atoll audit` found an entry of which that is not
true, or two logs that are both proven and differ.

    atoll audit RUN                     check this machine's log
    atoll audit RUN --export FILE       on another member's machine; send the file here
    atoll audit RUN --with FILE         compare

If only this machine's log is wrong, move the run's folder away and join again: the log is
fetched from the others and checked. If two members have different logs that are both proven,
the run has two histories: see atoll explain E305.""",
    ),
    "E205": ErrorPage(
        "banned",
        "a peer is banned",
        77,
        """\
The run's organiser has banned a peer from the run (`atoll ban PEER`), and every member then
refuses it; or one member has banned it from its own machine. The reason is in the message. What
the peer had contributed to decided rounds stays in them.

If it is you: ask the organiser, who alone can lift a ban of the run (`atoll unban PEER`). Other
runs are not touched.""",
    ),
    "E206": ErrorPage(
        "role",
        "this node's invite is not one to train",
        77,
        """\
An invite is to train, to observe or to aggregate (`atoll invite inspect`). A node that observes
has the model and follows the run; one that aggregates votes and adds up for the others. Neither
contributes, and the other members refuse what it would contribute.

To train, ask the organiser for another invite (`atoll invite new --role train`) and join with
it: atoll join INVITE""",
    ),
    "E210": ErrorPage(
        "key-file",
        "the key file cannot be used",
        77,
        """\
Whoever reads this file can speak in your name, so atoll refuses a file that others may read, as
ssh does.

    chmod 600 ~/.local/share/atoll/identity.key

When the file is damaged: restore it from a backup, or move it away and run `atoll init` for a
new key. A new key is a new peer; runs that you organise can then no longer be signed for.""",
    ),
    "E300": ErrorPage(
        "state",
        "local state does not fit",
        74,
        """\
What lies on disk does not belong to what the run has committed. The message names the file.
Moving the run's folder away and joining again fetches a good state from the others.""",
    ),
    "E301": ErrorPage(
        "model-mismatch",
        "your model is not the run's model",
        76,
        """\
All members of a run train the same tensors: same names, same shapes, same order. The message
lists those that differ. Compare with whoever made the run; for a built-in model leave the model
to the manifest.""",
    ),
    "E302": ErrorPage(
        "digest",
        "bytes do not have the hash they must have",
        74,
        """\
Received bytes are discarded, their sender is marked, and they are fetched from somebody else;
then there is nothing to do. If it is a file of this machine, the disk is suspect.""",
    ),
    "E303": ErrorPage(
        "damaged",
        "a file on this disk is damaged",
        74,
        """\
A checkpoint, journal or manifest does not fit its own hash. atoll does not use it. Where the
run has other members there is nothing to do: the old files are set aside, the state is fetched
from the others and checked on arrival. Where nobody else is known to have the state, nothing is
touched and the run waits: restore the file from a backup and try again, or, if others do have
the state, move the run's folder away and join again. Your key and your other runs are not
touched. If it happens again, check the disk.

Disks that lost what they had confirmed can leave no member with a whole state: `atoll status`
says "lacking state" at all of them, and that every member seeks it. Each still has a checkpoint.
`atoll export RUN DIR` writes the newest one there and prints its round; do it at each member, and
at the one with the newest: `atoll new --from DIR --name NAME`. Rounds after it are lost.""",
    ),
    "E304": ErrorPage(
        "out-of-date",
        "local state is older than the run",
        74,
        """\
The run went on without this copy. A log is never rewound: load a newer state, or join again and
let the node fetch it.""",
    ),
    "E305": ErrorPage(
        "founded-twice",
        "the run has two histories",
        74,
        """\
Two logs of the run are certified, and each has rounds that the other has not. Members of each
ignore those of the other, and both go on. The message says which is the first entry that
differs, its name in either log, and how far each has come. It comes of

* a run that was founded twice: the organiser's node had lost the run's state and founded it
  again while no other member could be asked;
* a home that was put back from an old copy in which few enough were members to decide without
  the others, who were away; or homes that were copied to other machines and went on there;
* a member that `atoll recertify` had given up for lost, and that decided on elsewhere.

Nothing of either is lost:

    atoll export RUN DIR        on a member of each: keep both models

Then choose one. On every machine of the other: atoll down, move the run's folder away (`atoll
config path` names the folder of runs), atoll up, join again. In a run with privacy put the file
`privacy` of the old folder into the new one before its script contributes: what a site has spent
in the history that is given up stands there only.""",
    ),
    "E306": ErrorPage(
        "recertify",
        "that cannot be recertified",
        78,
        """\
`atoll recertify` goes on without members that are lost for ever, where those left are too few
to decide. It was refused, and nothing was done, because one of these holds: this node is not
the organiser's, or has not got the run's state; a member that you named is alive, or was never
a member; those left are enough to decide anyway, and evict the silent by themselves; or the
manifest has `[quorum] lying`, where one member's word, the organiser's too, decides nothing:
docs/operating/hostile.md says what is left to do there.

A node whose machine lost power goes on with the state on its disk. Where that is damaged, it
needs another node that has it, or a backup of its folder of the run; `atoll status` shows a
round once the state is there. Its own earlier life need not be named, but in a run of two,
where it is the only one to name.

    atoll peers RUN              who is there, and who is lost
    atoll status                 how many members the open round waits for""",
    ),
    "E307": ErrorPage(
        "removed",
        "the organiser has removed this node from the run",
        77,
        """\
This node was taken to be lost for ever, and the run went on without its votes (`atoll
recertify`). Its journal must never vote again, so the node takes no part any more. What its
script did since its last certified round is in no round of the run.

To come back as a new member: atoll down, move the run's folder away (`atoll config path` names
the folder of runs), atoll up, and join again. The state is fetched from the others. In a run with
privacy the log counts, by the site's name, what it may have spent before.""",
    ),
    "E308": ErrorPage(
        "doubled",
        "another process has this node's key and lives",
        77,
        """\
Two live processes have one key: a home was copied to another machine, or is part of an image
that was started twice. Both would vote in one name, and could vote differently. So both take no
more part in the run until one of them is gone; `atoll peers` of the other members names the
peer as doubled.

Stop one of the two (`atoll down`). On its machine enter again with a key of its own: atoll join
INVITE --fresh-key. Then start the other again: atoll down, atoll up. In a run with privacy both are
one site, which has one key at a time: stop one of them for good, or give the other's machine an
invite for a name of its own, if its data are others.""",
    ),
    "E309": ErrorPage(
        "foreign-state",
        "the run's folder belongs to another node",
        74,
        """\
The folder says which peer voted from it, and that is not this node: folders of two nodes were
exchanged, or the key was. With another's votes in place of its own this node could vote twice
in one round. Nothing was changed.

Find the home whose key the message names, and put each run's folder back beside its key (`atoll
config path` names both). Where that key is gone: atoll down, move the run's folder away, atoll
up, join again. The state is fetched from the other members, and this node is a member in a new
life. In a run with privacy the log counts, by the site's name, what it may have spent before.""",
    ),
    "E310": ErrorPage(
        "other-base",
        "what is frozen in your model is not what the run has",
        76,
        """\
Adapters fit the frozen parameters that they were trained on. attach() compares a digest of the
names, shapes and values of all parameters that require no gradient with that of whoever founded
the run. The type does not matter: bfloat16 weights are the same base in float32.

- Load the same checkpoint in the same revision, from_pretrained(NAME, revision="...").
- With mode = "ffa" the matrices lora_A are frozen too, and drawn at random: call
  torch.manual_seed(N), with N from the run's manifest, just before get_peft_model, on the CPU.
- Where some members hold the base in another precision (QLoRA), the manifest has to say so, which
  makes another run:

    [adapters]
    base = "shapes"              names and shapes are compared, values are not""",
    ),
    "E400": ErrorPage(
        "config",
        "a setting is wrong",
        78,
        """\
The message names the key by its path, such as $.train.outer.lr, and what may stand there.
Unknown keys are errors, so that a typing mistake cannot silently train with a default.

    atoll validate RUN.toml      check a manifest
    atoll config show            settings in use, and where each comes from

Data are not named in a manifest: each machine gives its own, atoll join RUN.toml --data FILE.
Without training anything, --dry-run beside it reads them and shows the first sample.""",
    ),
    "E410": ErrorPage(
        "no-toml",
        "a file of settings is not valid TOML",
        78,
        """\
The message names line and column. The usual causes: a text without quotes, a table that is not
written like [train.outer], the same key twice, true and false with capitals, a comment that
does not begin with #.

    name = "my-run"              texts have quotes
    rounds = 100                 numbers have none
    [train]                      a table begins with its name in brackets, on a line of its own
    atoll new --example          prints a manifest to compare with""",
    ),
    "E411": ErrorPage(
        "unknown-key",
        "a file of settings has a key that does not exist",
        78,
        """\
No setting has this name in this table: a typing mistake, a key that stands under the wrong
[table], one of a newer atoll, or one that was removed: then the message names what to use instead.
It is an error, so that a mistake cannot silently train with a default. The message offers the key
that is most like it, or lists those that exist there.

    atoll new --example          a manifest with the usual keys, each in its table
    atoll config show            the settings of this machine, each under its name
    atoll version                a key of a newer release needs that release""",
    ),
    "E412": ErrorPage(
        "missing-key",
        "a file of settings lacks a key that has no default",
        78,
        """\
A manifest has at least these two lines; the message names what is missing where a table needs
more.

    schema = 1
    name = "my-run"

`atoll new --example` prints one with the usual tables.""",
    ),
    "E413": ErrorPage(
        "bad-value",
        "a setting has a value that it cannot have",
        78,
        """\
The key is right and its value is not: a text where a number must stand, a number out of range,
or a word that is none of the choices, which the message lists. Numbers have no quotes, texts
have; 0.5 is no whole number.

    atoll validate RUN.toml      says whether it is mended""",
    ),
    "E414": ErrorPage(
        "settings-exclude",
        "settings are right one by one and cannot be had together",
        78,
        """\
Each of the values may stand in a manifest, and these exclude each other or need one another.
The message names the key to change, why it cannot work, and a way out. Where several are wrong
all are told at once.

    atoll validate RUN.toml --explain      what the settings come to
    atoll new --template federated-hospital      a manifest whose settings fit together""",
    ),
    "E415": ErrorPage(
        "base-model",
        "a run's pretrained model cannot be had here, or is another than the run's",
        78,
        """\
The founder signs the sha256 of every file of the model that a run starts from, and what its
tokenizer makes of a text. A member's copy is compared before it trains. The message names what
differs, or what is missing:

* a gated model: accept its licence on the hub, then  hf auth login;
* no network: members of the run hand the files on, unless the model is gated; the same command
  again goes on with what came. Or a folder that has them, with --model DIR;
* another revision, another tokenizer file: leave --model out, or get the founder's files;
* libraries that read equal files otherwise: the founder's versions, which the message names;
* weights as pickles, Python of the model's own, the package kernels beside transformers: these
  would run code, and are refused.

    atoll validate RUN.toml       which model it is
    atoll join RUN --model DIR    where this machine has it""",
    ),
    "E416": ErrorPage(
        "too-large",
        "a machine does not hold the run: memory or disk would not do",
        78,
        """\
What training takes is counted from the shape of the model before anything is downloaded: weights,
gradients, the optimizer's state, activations, and atoll's own. The message says what is short,
and the settings with which the run would fit; they are the founder's to choose, since all members
train alike.

    atoll fit                     what this machine can train
    atoll fit RUN.toml            by which method, with which settings
    atoll plan RUN.toml           with --machine for each: settings that all of them hold""",
    ),
    "E417": ErrorPage(
        "own-data",
        "this machine's data cannot be trained on as they are",
        78,
        """\
The message names file and line of each record that cannot be read as it was meant; the first ten
are listed, and nothing is trained until all are in order. What a record may be:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}   ShareGPT
    {"instruction": "…", "input": "…", "output": "…"}                                     alpaca
    {"prompt": "…", "completion": "…"}
    {"text": "…"}

one a line (.jsonl), in one array (.json), as rows of .csv, .tsv or .parquet; or .txt and .md.
Records of one file are alike; [data] format says of which kind they are, where keys do not.

    atoll join RUN.toml --dry-run --data FILE    reads the data, shows the first sample, and stores
                                                 nothing""",
    ),
    "E501": ErrorPage(
        "storage",
        "a file could not be written or read",
        73,
        """\
Most often the disk is full or the folder belongs to somebody else. Training goes on where it
can; files are replaced atomically, so the older version is still there. "Input/output error" is
another matter: the medium itself failed, and freeing space does not help. Move the state before
the disk dies; dmesg and smartctl tell how it stands.

    df -h ~                       how much is free
    atoll config path             which folders are in use
    ATOLL_HOME=/bigger/disk/atoll atoll up""",
    ),
    "E502": ErrorPage(
        "system",
        "the system gave no more of something that every program needs",
        71,
        """\
Open files, memory, threads or an address: the message says which. Nothing that was committed is
lost, and the node goes on with what it has.

    ulimit -a                     what this shell's programs may have
    atoll validate run.toml       the memory that a run needs
    systemctl edit atoll          LimitNOFILE=, MemoryMax=, TasksMax= of a service""",
    ),
}


def page(code: str) -> ErrorPage:
    """The page of a code; of E000 for one that is unknown."""
    return PAGES.get(code.upper(), PAGES["E000"])
