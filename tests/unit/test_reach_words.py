"""What netcheck, status, peers, ping and relay say in every situation a node can be in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import PeerId
from atoll.node.cli import run
from atoll.node.cli.reaching import find_peer, pong
from atoll.node.home.names import name_of
from atoll.node.net.measuring import ByteRate
from atoll.node.net.reach.manager import AddressManager
from atoll.node.net.transport.addresses import at_home
from atoll.node.views.alone import alone_rows
from atoll.node.views.documents import path_text, peers_table, rates_text, status_text
from atoll.node.views.reach_views import (
    advice,
    clock_row,
    flow_row,
    lan_row,
    netcheck_lines,
    network_advice,
    network_error,
    network_rows,
    outcome,
    reach_text,
)
from atoll.node.watching.rates import Rates
from atoll.security.identity import Identity

RELAY, PEER, OTHER = (str(Identity(bytes([number]) * 32).peer) for number in range(3))
WAN = "/ip4/11.0.0.7/tcp/4150"


def document(
    *,
    wan: dict[str, bool] | None = None,
    second: str = WAN,
    public: bool = False,
    relays: bool = False,
) -> dict[str, Any]:
    """The status of a real address manager: an interface, two observers, who reached us, and
    whether a relay has a place for us.
    """
    manager = AddressManager()
    manager.interfaces([WAN if public else "/ip4/192.168.1.2/tcp/4150"])
    if wan is not None:
        manager.observed("11.1.0.1", WAN, 0.0)
        manager.observed("11.2.0.1", second, 0.0)
    for server, reached in (wan or {}).items():
        manager.report(WAN, server, reached, 0.0)
    return {
        **manager.status(0.0),
        "relays": {RELAY: [f"/ip4/11.1.0.1/tcp/1/p2p/{RELAY}/p2p-circuit"]} if relays else {},
    }


SITUATIONS = [
    (
        "public",
        document(public=True, wan={"11.1.0.1": True, "11.2.0.1": True}),
        "others can dial this node",
        "",
    ),
    ("public", document(wan={"11.1.0.1": True, "11.2.0.1": True}), "others can dial this node", ""),
    (
        "relayed",
        document(wan={"11.1.0.1": False}, relays=True),
        "behind a NAT; others come through 1 relay, then",
        "forward TCP 4150",
    ),
    (
        "cut-off",
        document(wan={"11.1.0.1": False}),
        "it dials others, nobody dials it",
        "Forward TCP 4150",
    ),
    (
        "relayed",
        document(wan={}, second="/ip4/11.0.0.7/tcp/9", relays=True),
        "behind a NAT",
        "behind other NATs stay relayed",
    ),
    ("cut-off", document(wan={}, second="/ip4/11.0.0.7/tcp/9"), "nobody dials it", "atoll relay"),
    ("local", document(), "private networks only", ""),
    ("unknown", document(wan={}), "not known yet", "within seconds"),
]


@pytest.mark.parametrize(("verdict", "reach", "says", "hint"), SITUATIONS)
def test_every_situation_has_its_words(
    verdict: str, reach: dict[str, Any], says: str, hint: str
) -> None:
    assert outcome(reach) == verdict
    assert says in reach_text(reach)
    level, what, text = netcheck_lines(reach)[0]
    assert (what, text) == ("reach", reach_text(reach))
    assert level == {"cut-off": "fail", "unknown": "warn"}.get(verdict, "ok")
    told = advice(reach, 4150)
    assert hint in told
    assert bool(hint) == bool(told)


def test_who_reached_which_address() -> None:
    rows = netcheck_lines(document(wan={"11.1.0.1": True, "11.2.0.1": False, "11.3.0.1": True}))
    assert ("ok", "address", f"{WAN}  reached by 2 of 3 public peers that tried") in rows
    assert netcheck_lines(document(wan={}))[-1] == (
        "warn",
        "address",
        f"{WAN}  nobody has tried it yet",
    )


def test_refusals_of_relays_are_named() -> None:
    reach = {**document(wan={"11.1.0.1": False}), "relays_refused": {RELAY: "is full"}}
    assert netcheck_lines(reach)[-1][::2] == ("warn", f"{name_of(RELAY)} …{RELAY[-8:]} is full")


def hidden(**more: Any) -> dict[str, Any]:
    """The same of a node that is reached through relays only."""
    manager = AddressManager(relay_only=True)
    manager.interfaces(["/ip4/127.0.0.1/tcp/4150"])
    return {**manager.status(0.0), "port_mapping": "", **more}


@pytest.mark.parametrize(
    ("reach", "verdict", "says", "hint", "why"),
    [
        (
            hidden(relays={RELAY: []}),
            "relayed",
            "others come through 1 relay, and only so: network.relay_only is on",
            "",
            "",
        ),
        (
            hidden(),
            "cut-off",
            "through relays only, and no relay takes this node (yet)",
            "Name a node that relays, as atoll relay does on a machine with a public address: atoll up --relay-only --bootstrap ADDRESS",
            "With network.relay_only it dials nobody but the nodes that settings and invites name.",
        ),
        (
            hidden(relays_refused={RELAY: "relays only for peers of runs it knows"}),
            "cut-off",
            "no relay takes this node",
            "Or name a node that relays",
            "The relays say: “relays only for peers of runs it knows”. With network.relay_only",
        ),
    ],
)
def test_who_is_reached_through_relays_only_is_told_nothing_that_would_show_it(
    reach: dict[str, Any], verdict: str, says: str, hint: str, why: str
) -> None:
    rows = netcheck_lines(reach)
    assert outcome(reach) == verdict
    assert says in rows[0][2]
    assert {what for _, what, _ in rows} <= {
        "reach",
        "relay",
    }  # no router, no address, no kind of NAT
    assert hint in advice(reach, 4150)
    assert bool(hint) == bool(advice(reach, 4150))
    error = network_error({"reach": reach}, [])
    assert why in (error.why if error else "")
    assert "forward" not in f"{advice(reach, 4150)} {error and error.hint}"


def test_who_is_reached_through_relays_only_and_knows_none() -> None:
    network = {"connected": [], "bootstrap": {}, "reach": hidden(), "lan": {"on": False}}
    rows = network_rows(network, [])
    assert rows[0][::2] == (
        "warn",
        "nobody was met; no bootstrap address is known, and nobody comes to a node without a relay: network.relay_only is on",
    )
    assert rows[1][2].startswith("the house is not searched: network.relay_only is on")
    assert "atoll up --relay-only --bootstrap ADDRESS" in network_advice(network)


@pytest.mark.parametrize(
    ("addresses", "home"),
    [
        (
            (
                f"/ip4/192.168.2.2/tcp/4150/p2p/{PEER}",
                f"/ip6/2a0b:11:2:1::2/tcp/4150/p2p/{PEER}",
                f"/ip4/127.0.0.1/tcp/4150/p2p/{PEER}",
            ),
            True,
        ),
        ((f"/ip4/100.64.0.9/tcp/4150/p2p/{PEER}",), True),  # behind a carrier's router
        ((f"{WAN}/p2p/{PEER}",), False),
        ((f"/ip4/192.168.2.2/tcp/4150/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",), False),
        ((f"/dns4/boot.example.org/tcp/4150/p2p/{PEER}",), False),
        (("/dnsaddr/boot.example.org",), False),
        ((), False),
    ],
)
def test_a_node_that_only_its_own_house_can_dial_is_told_so(
    addresses: tuple[str, ...], home: bool
) -> None:
    assert at_home(addresses) == home
    told = network_advice({"connected": [], "bootstrap": {}, "addresses": list(addresses)})
    assert ("For others name a node with a public address" in told) == home


REFUSED = f"cannot reach {PEER}: /ip4/11.0.0.9/tcp/4150: [Errno 111] Connection refused"
SILENT = (
    f"cannot reach {PEER}: no answer in 10 s from /ip4/11.0.0.9/tcp/4150, /ip4/11.0.0.8/tcp/4150"
)
NO_WAY = f"cannot reach {PEER}: /ip4/11.0.0.9/tcp/4150: [Errno 101] Network is unreachable"
NO_NAME = "the name boot.example.org is not known"


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            REFUSED,
            f"{name_of(PEER)} …{PEER[-8:]}  /ip4/11.0.0.9/tcp/4150 refused: that machine is there, but no node listens at that port",
        ),
        (
            SILENT,
            f"{name_of(PEER)} …{PEER[-8:]}  /ip4/11.0.0.9/tcp/4150 no answer: it is off, has moved, or a firewall is in between",
        ),
        (
            NO_WAY,
            f"{name_of(PEER)} …{PEER[-8:]}  /ip4/11.0.0.9/tcp/4150 no way there: this machine's network does not lead to it"
            " (/ip4/ needs IPv4, /ip6/ IPv6)",
        ),
        (NO_NAME, f"{name_of(PEER)} …{PEER[-8:]}  {NO_NAME}"),
        ("connecting", f"{name_of(PEER)} …{PEER[-8:]}  is being tried"),
    ],
)
def test_how_each_bootstrap_address_was_tried(state: str, says: str) -> None:
    assert ("warn", "entry", says) in network_rows(
        {"connected": [], "bootstrap": {PEER: state}}, []
    )


@pytest.mark.parametrize(
    ("bootstrap", "level", "code", "why", "hint"),
    [
        (
            {PEER: REFUSED, "/dnsaddr/boot.example.org": NO_NAME},
            "fail",
            "E110",
            "Training goes on alone",
            "atoll invite new",
        ),
        ({PEER: NO_WAY}, "fail", "E110", "no network that leads there", "Connect it"),
        ({PEER: REFUSED, OTHER: "connecting"}, "warn", None, "", "Ask again in a few seconds"),
        ({}, "warn", None, "", "atoll up --bootstrap ADDRESS"),
    ],
)
def test_nobody_was_met(
    bootstrap: dict[str, str], level: str, code: str | None, why: str, hint: str
) -> None:
    network = {
        "connected": [],
        "bootstrap": bootstrap,
        "reach": document(),
        "lan": {"on": True, "trouble": "", "found": {}},
        "remembered": 3,
    }
    first, *entries, last = network_rows(network, [])
    assert first[:2] == (level, "reach")
    assert len(entries) == len(bootstrap)
    assert last[2].startswith(
        "nobody found in the house (multicast DNS); none of 3 remembered peers answers; the DHT"
    )
    error = network_error(network, [])
    assert (error and error.code) == code
    assert why in (error.why if error else "")
    assert hint in (error.hint if error else network_advice(network))
    if len(bootstrap) == 2 and error:
        assert (
            error.message
            == "none of 2 bootstrap addresses answers; this is not a ban and your key is fine"
        )
    if error:
        assert error.exit_code == 69


def test_how_the_house_was_searched() -> None:
    assert (
        "network.lan_discovery is off; no other peers are remembered"
        in alone_rows({"connected": [], "lan": {"on": False}})[-1][2]
    )
    trouble = {"on": True, "trouble": "no such device"}
    assert (
        "cannot be searched (multicast DNS): no such device"
        in alone_rows({"connected": [], "lan": trouble})[-1][2]
    )


def test_what_keeps_a_node_from_taking_part_is_an_error() -> None:
    assert (
        network_error(
            {"connected": [PEER], "reach": document(public=True, wan={"11.1.0.1": True})},
            clocks(0.1),
        )
        is None
    )
    wrong = network_error(
        {"connected": [PEER], "reach": document(public=True)}, clocks(900.0, 901.0)
    )
    assert wrong is not None
    assert (wrong.code, wrong.exit_code) == ("E120", 75)
    assert "timedatectl" in wrong.hint
    reach = {
        **document(wan={"11.1.0.1": False}),
        "relays_refused": {RELAY: "relays only for peers of runs it knows"},
    }
    cut_off = network_error({"connected": [PEER], "reach": reach, "addresses": [WAN]}, clocks(0.1))
    assert cut_off is not None
    assert (cut_off.code, cut_off.exit_code) == ("E130", 69)
    assert "relays only for peers of runs it knows" in cut_off.why
    assert cut_off.hint.startswith(
        "Join a run: its relays know this node then. Or forward TCP 4150 on your router to 192.168.1.2,"
    )


def test_what_the_router_said() -> None:
    def mapping(**more: Any) -> list[str]:
        return [
            text
            for _, what, text in netcheck_lines(
                {**document(wan={"11.1.0.1": False}, relays=True), **more}
            )
            if what == "mapping"
        ]

    assert mapping(mappings={"upnp": WAN}) == [f"{WAN} by upnp"]
    assert mapping(port_mapping="none") == [
        "the router opens no port when it is asked (NAT-PMP, UPnP)"
    ]
    assert "network.port_mapping is off" in mapping(port_mapping="off")[0]
    assert "is being asked" in mapping(port_mapping="")[0]
    assert "another router, or the provider's, stands before it" in mapping(port_mapping="inner")[0]
    assert "and on the router before it to yours" in advice(
        {**document(wan={}, relays=True), "reach": "private", "port_mapping": "inner"}, 4150
    )
    assert mapping() == []  # a node of an older version


def test_an_older_node_says_nothing_and_nothing_is_made_up() -> None:
    assert outcome({}) == "unknown"
    assert path_text({"peer": PEER, "path": "direct"}) == "direct"


def test_status_and_peers_show_the_paths() -> None:
    from atoll.node.home.output import Terminal

    terminal = Terminal(no_color=True)
    network = {
        "addresses": [],
        "connected": [],
        "reach": document(public=True, wan={"11.1.0.1": True}),
    }
    assert (
        "  reach    others can dial this node"
        in status_text(terminal, {"peer": PEER, "network": network}).splitlines()
    )
    text = status_text(
        terminal,
        {"peer": PEER, "network": {**network, "bootstrap": {OTHER: REFUSED, RELAY: "connected"}}},
    )
    assert [line for line in text.splitlines() if "  entry " in line] == [
        f"  entry    {name_of(OTHER)} …{OTHER[-8:]}  /ip4/11.0.0.9/tcp/4150 refused: that machine is there, but no node listens at that port"
    ]
    rows = [
        {"peer": PEER, "path": "lan", "link": "lan", "rtt_ms": 0.4},
        {"peer": OTHER, "path": "stream", "link": "relay", "rtt_ms": 101.6},
        {"peer": RELAY, "path": "", "link": "punched", "rtt_ms": None},
    ]
    text = peers_table(terminal, rows)
    assert "stream, messages relay" in text
    assert "102 ms" in text
    assert "punched, no lane" in text


def test_peers_are_named_in_three_ways() -> None:
    status = {
        "network": {"connected": [PEER], "runs": {"r": [OTHER]}},
        "runs": [{"members": [PEER, OTHER]}],
    }
    assert (
        find_peer(status, PEER)
        == find_peer(status, PEER[-8:])
        == find_peer(status, f"…{PEER[-8:]}")
        == find_peer(status, name_of(PEER))
    )
    assert find_peer(status, RELAY) == RELAY  # a whole id may be one we have not met
    with pytest.raises(ConfigError, match="no peer is called 'nobody'"):
        find_peer(status, "nobody")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("relay", "through a relay"),
        ("punched", "punched 11.0.0.9"),
        ("lan", "lan 11.0.0.9"),
        ("direct", "direct 11.0.0.9"),
    ],
)
def test_pong(path: str, says: str) -> None:
    line = pong(
        {
            "peer": PEER,
            "path": path,
            "rtt_ms": 31.25,
            "address": "" if path == "relay" else "11.0.0.9",
        }
    )
    assert line == f"pong from {name_of(PEER)} …{PEER[-8:]}  31.2 ms  {says}"


def test_the_unit_names_the_program_that_printed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "atoll").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["./atoll"])
    assert run(["relay", "--print-systemd"]) == 0
    assert f"ExecStart={tmp_path}/atoll relay --port=4150\n" in capsys.readouterr().out


def test_a_relay_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", "--port", "4151", "--announce", WAN, "--print-systemd"]) == 0
    unit = capsys.readouterr().out
    assert "relay --port=4151 --announce=/ip4/11.0.0.7/tcp/4150\n" in unit
    assert "DynamicUser=yes" in unit
    assert run(["relay", "--print-container", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["container"]
    assert 'ENTRYPOINT ["atoll", "relay", "--port=4150"]' in text
    assert "EXPOSE 4150/tcp 4151/tcp" in text
    assert run(["relay", "--announce", WAN, "--known-runs-only", "--print-container"]) == 0
    assert f'"--announce={WAN}", "--known-runs-only"]' in capsys.readouterr().out
    assert "CAP_NET_BIND_SERVICE" not in unit
    assert run(["relay", "--port", "443", "--print-systemd"]) == 0
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in capsys.readouterr().out


def test_netcheck_and_ping_need_a_node(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["netcheck"], ["ping", "calm-heron"]):
        assert run([*command, "--home", str(tmp_path), "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "E003"


def test_doctor_finds_and_mends(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor(*options: str, status: int = 0) -> dict[str, str]:
        assert run(["doctor", *options, "--home", str(tmp_path), "--json"]) == status
        return {
            found["what"]: found["level"]
            for found in json.loads(capsys.readouterr().out)["findings"]
        }

    assert doctor() == {"versions": "ok", "identity": "warn", "disk": "ok", "node": "warn"}
    assert doctor("--fix")["identity"] == "ok"
    key = next(tmp_path.rglob("identity.key"))
    key.chmod(0o644)
    assert doctor(status=1)["identity"] == "fail"
    assert doctor("--fix")["identity"] == "ok"
    assert key.stat().st_mode & 0o777 == 0o600


def clocks(*ahead_s: float) -> list[dict[str, Any]]:
    return [{"peer": PEER, "ahead_s": ahead, "within_s": 0.01} for ahead in ahead_s]


@pytest.mark.parametrize(
    ("ahead_s", "level", "says"),
    [
        ((), "ok", "not compared"),
        ((0.04, -0.2, 3.0), "ok", "+0.04 s against 3 peers"),
        ((-2.0,), "ok", "-2.00 s against 1 peer"),
        ((94.0, 95.0, 93.0), "warn", "ahead of 3 of 3 peers; beyond 300 s"),
        ((-600.0, -601.0, 0.0), "fail", "behind 2 of 3 peers (limit 300 s)"),
        ((900.0, 0.0, 0.0), "ok", "+0.00 s"),  # one peer's clock is wrong, not ours
        (
            (900.0, -900.0, 4000.0),
            "warn",
            "ahead of 1 of 3",
        ),  # they do not even agree among themselves
    ],
)
def test_clocks_are_compared(ahead_s: tuple[float, ...], level: str, says: str) -> None:
    found = clock_row(clocks(*ahead_s))
    assert found[:2] == (level, "clock")
    assert says in found[2]


def test_bandwidth_and_rates_in_words() -> None:
    flow = {
        "peer": PEER,
        "path": "relay",
        "up_bytes_per_s": 2_325_000,
        "down_bytes_per_s": 1_050_000,
    }
    assert flow_row(flow)[2].startswith(
        f"to {name_of(PEER)} …{PEER[-8:]} up 19 Mbit/s, down 8.4 Mbit/s, path relay (through"
    )
    assert rates_text({"up_bytes_per_s": 1_040_000, "down_bytes_per_s": 0}) == "1.0 / 0.0"
    assert rates_text({"up_bytes_per_s": 0, "down_bytes_per_s": -1e-9}) == "0.0 / 0.0"
    assert rates_text({"up_bytes_per_s": None, "down_bytes_per_s": None}) == rates_text({}) == "–"


def test_the_house_in_words() -> None:
    assert lan_row({}) is lan_row({"on": True, "trouble": "", "found": {}}) is None
    assert lan_row({"found": {PEER: "/ip4/192.168.1.7/tcp/1"}}) == (
        "ok",
        "lan",
        "1 peer found in the house",
    )
    assert lan_row({"trouble": "no such device", "found": {}}) == (
        "warn",
        "lan",
        "peers in the house cannot be looked for: no such device",
    )


def test_rates_are_means_of_the_last_minute() -> None:
    a, b, rates = PeerId(PEER), PeerId(OTHER), Rates()
    assert rates.of(a) is None
    for second in range(0, 125, 5):
        rates.sample(
            float(second),
            {a: (1000 * second, 10 * second)} | ({b: (0, 0)} if second == 120 else {}),
        )
    assert rates.of(a) == (1000, 10)
    assert rates.of(b) is None
    rates.sample(130.0, {a: (500, 0), b: (2000, 70)})  # the lane to a is another one now
    assert rates.of(b) == (200, 7)
    assert rates.of(a) == (round((50_000 + 500) / 60), round(500 / 60))  # since second 70
    rates.sample(135.0, {b: (2000, 70)})
    assert rates.of(a) is None


def test_a_flow_is_measured_once_it_is_under_way() -> None:
    """A connection begins slowly; the later half counts."""
    flow = ByteRate()
    assert flow.rate() == 0
    for tenth in range(41):
        flow.add(tenth / 10, 1000 if tenth <= 20 else 100_000)
    assert flow.rate() == 1_000_000
