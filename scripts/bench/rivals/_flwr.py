"""Flower beside us, in an environment of its own: its server optimizers on given deltas, its
simulation on our task, its memory.

python scripts/bench/rivals/_flwr.py > tests/unit/federated_flwr.json        the table that our outer steps are
tested against
"""

# Flower is in its own environment:
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # helpers of the measurements

from _environment import OUT, Unavailable, set_up

VERSION = "1.41.0"
WHAT, FOLDER = f"flwr {VERSION}", OUT / "flwr"
INSTALL_S, ANSWER_S = 900, 550
SHAPE, ROUNDS, WEIGHTS = (7,), 6, (1, 4, 5)
STRATEGIES: dict[str, dict[str, float]] = {
    "FedAvg": {},
    "FedAvgM": {"server_learning_rate": 0.5, "server_momentum": 0.9},
    "FedAdam": {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
    "FedYogi": {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
    "FedAdagrad": {"eta": 0.1, "tau": 1e-3},
}


def environment() -> str:
    """Python of an environment with Flower and its simulation, made on first use; ours is behind it
    on the path. Raises Unavailable.
    """
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "complete").exists():
        print(f"flwr: making an environment with flwr {VERSION}", file=sys.stderr)
        set_up(WHAT, [sys.executable, "-m", "venv", "--clear", str(FOLDER)], INSTALL_S)
        set_up(
            WHAT,
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-input",
                f"flwr[simulation]=={VERSION}",
            ],
            INSTALL_S,
        )
        import torch

        site = next((FOLDER / "lib").glob("python*")) / "site-packages"
        ours = dict.fromkeys((sysconfig.get_path("purelib"), str(Path(torch.__path__[0]).parent)))
        lines = [
            f"import site; site.addsitedir({folder!r})\n" for folder in ours
        ]  # both train with the same torch, and with our model
        (site / "zz_ours.pth").write_text("".join(lines), encoding="utf-8")
        (FOLDER / "complete").touch()
    return str(python)


def ask(**question: Any) -> Any:
    """The answer of a process in that environment to one question. Raises Unavailable."""
    try:
        done = subprocess.run(
            [environment(), __file__, "--inside"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"no answer within {ANSWER_S} s to {question}") from None
    if done.returncode:
        raise Unavailable(f"Flower ended at {question}: {done.stderr[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def deltas() -> list[list[list[float]]]:
    """What three clients' parameters differ from the anchor by in each round: some numbers of
    different sizes.
    """
    import math

    return [
        [
            [math.sin(1 + 7 * r + 3 * c + i) * 10.0 ** (i % 3 - 1) for i in range(SHAPE[0])]
            for c in range(len(WEIGHTS))
        ]
        for r in range(ROUNDS)
    ]


def server_table() -> dict[str, Any]:
    """Inside: the anchors of every strategy after each round, from zero."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import strategy as strategies
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # a message needs them

    class Nobody:
        """A grid without nodes."""

        def get_node_ids(self) -> list[int]:
            return [1, 2, 3]

    table: dict[str, list[list[float]]] = {}
    for name, options in STRATEGIES.items():
        strategy = getattr(strategies, name)(fraction_evaluate=0.0, **options)
        anchor, table[name] = np.zeros(SHAPE, np.float32), []
        for number, each in enumerate(deltas(), 1):
            strategy.configure_train(
                number, ArrayRecord({"w": Array(anchor)}), ConfigRecord(), Nobody()
            )
            replies = [
                Message(
                    RecordDict(
                        {
                            "arrays": ArrayRecord(
                                {
                                    "w": Array(
                                        (anchor + np.array(delta, np.float32)).astype(np.float32)
                                    )
                                }
                            ),
                            "metrics": MetricRecord({"num-examples": weight}),
                        }
                    ),
                    dst_node_id=node,
                    message_type="train",
                )
                for node, (delta, weight) in enumerate(zip(each, WEIGHTS, strict=True), 1)
            ]
            arrays, _ = strategy.aggregate_train(number, replies)
            anchor = arrays.to_numpy_ndarrays()[0]
            table[name].append([float(value) for value in anchor])
    return table


def simulated(spec: dict[str, Any]) -> dict[str, Any]:
    """Inside: Flower's FedAvg on our task by `run_simulation`: accuracy by rounds, seconds in all
    and of the rounds alone.
    """
    from _federated import Spec, local_steps, task
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from atoll.optim.federated.simulation.task import Learner

    given, whole = Spec(**spec), task(spec["seed"])
    client_app, server_app = ClientApp(), ServerApp()
    curve: list[tuple[float, float]] = []

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        import torch

        torch.set_num_threads(1)
        anchor = torch.from_numpy(message.content["arrays"].to_numpy_ndarrays()[0].copy())
        turn = int(message.content["config"]["server-round"]) - 1
        live, rows = local_steps(given, int(context.node_config["partition-id"]), turn, anchor)
        content = {
            "arrays": ArrayRecord({"w": Array(live.numpy())}),
            "metrics": MetricRecord({"num-examples": rows}),
        }
        return Message(RecordDict(content), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        import torch

        learner = Learner(whole)

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
            accuracy = learner.measure(
                torch.from_numpy(arrays.to_numpy_ndarrays()[0].copy()), whole.test_x, whole.test_y
            )[0]
            curve.append((time.perf_counter(), accuracy))
            return MetricRecord({"accuracy": accuracy})

        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=given.clients, min_available_nodes=given.clients
        )
        first = ArrayRecord({"w": Array(learner.live.clone().numpy())})
        strategy.start(grid, first, num_rounds=given.rounds, evaluate_fn=evaluate)

    start = time.perf_counter()
    run_simulation(
        server_app,
        client_app,
        given.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "seconds_rounds": curve[-1][0] - curve[0][0],
        "accuracy": [accuracy for _, accuracy in curve],
    }


def memory(elements: int, clients: int) -> float:
    """Inside: what aggregating so many contributions, which are made one by one, adds to the
    process at most, in models.
    """
    import numpy as np
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def replies() -> Any:
        for node in range(1, clients + 1):
            arrays = ArrayRecord({"w": Array(np.full(elements, node, np.float32))})
            content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
            yield Message(content, dst_node_id=node, message_type="train")

    strategy, before = FedAvg(fraction_evaluate=0.0), peak()
    arrays, _ = strategy.aggregate_train(1, replies())
    assert arrays is not None
    assert abs(float(arrays.to_numpy_ndarrays()[0][0]) - (clients + 1) / 2) < 1e-3
    return (peak() - before) / (4 * elements)


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def _answer() -> None:
    import os

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
    # for the processes that Ray starts
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[-1:] + sys.path[:1])
    question = json.loads(sys.stdin.read())
    wanted = question.pop("what")
    print(
        json.dumps(
            {"table": server_table, "simulated": simulated, "memory": memory}[wanted](**question)
        ),
        flush=True,
    )


def main() -> None:
    """See the top of the file."""
    if sys.argv[1:] == ["--inside"]:
        return _answer()
    table = ask(what="table")
    json.dump(
        {
            "flwr": VERSION,
            "weights": WEIGHTS,
            "options": STRATEGIES,
            "deltas": deltas(),
            "anchors": table,
        },
        sys.stdout,
        indent=0,
    )
    print()


if __name__ == "__main__":
    main()
