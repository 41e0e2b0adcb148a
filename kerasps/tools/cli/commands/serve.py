"""The command `kerasps serve`: one worker or ps task, which TF_CONFIG names."""

from __future__ import annotations

import argparse

from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.tools.cli.commands.options import Commands, add_command, add_mode

_HELP = """\
Runs the server of one worker or ps task, until SIGTERM or SIGINT (exit code 0).

Start it on each machine of a cluster, or let a scheduler start it. TF_CONFIG names
this task and the addresses of all tasks; the task listens on its port in TF_CONFIG.
The script runs as the chief, with the same TF_CONFIG except for its "task". If the
chief is killed, the task starts again and empty. If each worker drives its own steps
(`kerasps.WorkerDrivenStrategy`), serve only ps, with --mode worker or without a chief
in TF_CONFIG: then a ps keeps its variables.

The server has no access control: everyone who can connect to its port can read and
write files as this user. It listens on one address, the host of its entry in
TF_CONFIG, so only the network of that address can reach it. Keep untrusted machines
off that network. If the host is no address of this machine (a service's name, or a
network behind address translation), the server does not start unless --bind gives
the address to listen on."""

_EPILOG = """\
environment variables:
  An option on the command line overrides its environment variable.
  TF_CONFIG                the cluster and this task (required)
  KERASPS_BIND             as --bind; the script uses it too, for the chief's server
  KERASPS_FULL_IMPORT      1: import all of TensorFlow, not only its server; or
                           names of further modules to import, for their custom
                           ops, with commas between them
  KERASPS_CPU_DEVICES      the CPU devices of a worker (default: 1), to try
                           `worker_devices` without GPUs

example:
  TF_CONFIG='{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"],
    "ps": ["host2:2222"]}, "task": {"type": "ps", "index": 0}}' kerasps serve"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    serve = add_command(
        commands,
        "serve",
        summary="run the server of the worker or ps task in TF_CONFIG",
        description=_HELP,
        epilog=_EPILOG,
    )
    add_mode(serve, "the process that drives the steps; with worker, the chief may restart")
    serve.add_argument(
        "--exit-with-chief",
        action="store_true",
        help="end with the run: with its exit code if `kerasps run` started the script, else with "
        "0 once the coordinator has ended (default: serve until a signal)",
    )
    serve.add_setting(
        *("--bind", str, None, "ADDRESS"),
        "the address of this machine to listen on, 0.0.0.0 for all",
        shown="the host of the task's entry in TF_CONFIG",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the task that TF_CONFIG names; does not return."""
    from kerasps.tools.cli.nodes.served_task import end_with_chief, serve_task

    description = read_tf_config(needs_chief=False, may_be_sparse=True)
    until = end_with_chief(description, args.mode) if args.exit_with_chief else None
    serve_task(
        description,
        name="kerasps serve",
        bind=args.bind,
        mode=args.mode,
        until=until,
        restarts=not args.exit_with_chief,
    )
