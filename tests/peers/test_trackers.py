"""A run that is killed and goes on, in TensorBoard, MLflow and Trackio themselves, read back by their
readers; wandb, offline, writes it too.

They are in the environment ``$ATTAR_PEERS/tensorboard`` (benchmarks/peers/environments.py builds it), whose
packages come after this one's.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PEERS = Path(os.environ.get("ATTAR_PEERS", "")) / "tensorboard" / "lib"
PACKAGES = sorted(PEERS.glob("python3*/site-packages")) if "ATTAR_PEERS" in os.environ else []
if not PACKAGES:
    pytest.skip("no trackers: set ATTAR_PEERS", allow_module_level=True)
pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

RUN = """
    import os
    from pathlib import Path
    from attar.tracking.track import stage_run, track

    progress = track("tensorboard", "mlflow", "trackio", "wandb", progress=False)
    Path(".out.work").mkdir(exist_ok=True)
    with stage_run(progress, "distill", {"model": "m", "alpha": 0.5}, Path("out"), group="study") as finish:
        with progress.task("distill", 6, done=FIRST) as task:
            for step in range(FIRST, LAST):
                task.advance(loss=1 / (step + 1))
        if LAST < 6:
            import time; time.sleep(3)
            os._exit(9)  # no end of the run, no exit handler
        finish({"kl_mean": 0.25})
"""
READ = """
    import json
    from pathlib import Path
    import trackio
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = Path("tensorboard/study").iterdir()
    board = EventAccumulator(str(folder)); board.Reload()
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("attar").experiment_id])
    history = client.get_metric_history(run.info.run_id, "distill/loss")
    from trackio.sqlite_storage import SQLiteStorage
    (record,) = SQLiteStorage.get_run_records("attar")
    logs = SQLiteStorage.get_logs("attar", record["name"], run_id=record["id"])
    print(json.dumps({
        "board": [(e.step, e.value) for e in board.Scalars("distill/loss")],
        "board_final": [(e.step, e.value) for e in board.Scalars("kl_mean")],
        "mlflow": [(m.step, m.value) for m in history],
        "mlflow_run": [run.info.status, run.data.params["alpha"], run.data.metrics["kl_mean"]],
        "trackio": [(row["step"], row["distill/loss"]) for row in logs if "distill/loss" in row],
        "trackio_final": [row["kl_mean"] for row in logs if "kl_mean" in row],
        "wandb": len(list(Path("wandb").glob("offline-run-*/*.wandb"))),
    }))
"""


def python(code: str, folder: Path, **values: int) -> subprocess.CompletedProcess[str]:
    """Run code where the trackers' packages come last."""
    for name, value in values.items():
        code = code.replace(name, str(value))
    code = f"import sys; sys.path.append({str(PACKAGES[0])!r})\n" + textwrap.dedent(code)
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_killed_run_is_whole_in_each_tracker(tmp_path: Path) -> None:
    first = python(RUN, tmp_path, FIRST=0, LAST=4)
    assert (first.returncode, first.stdout) == (9, "")
    second = python(RUN, tmp_path, FIRST=2, LAST=6)  # the state was of step 2
    assert (second.returncode, second.stdout) == (0, ""), second.stderr
    assert "goes on without" not in first.stderr + second.stderr
    read = python(READ, tmp_path)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    steps = [[step, pytest.approx(1 / step)] for step in range(1, 7)]
    assert found["board"] == steps
    assert found["mlflow"] == steps
    assert found["trackio"] == steps
    assert found["board_final"] == [[6, 0.25]]
    assert found["trackio_final"] == [0.25]
    assert found["mlflow_run"] == ["FINISHED", "0.5", 0.25]
    assert found["wandb"] == 2  # one file a process, of one id, which `wandb sync` joins
