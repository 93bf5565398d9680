"""Start a worker. A worker waits at an address for a run, and starts processes of the run on this machine. Ctrl-C or SIGTERM ends the worker.

python -m rl_actors.processes.worker tcp://10.0.0.5:4444
"""

import argparse
import sys

from monarch.actor import run_worker_loop_forever

from rl_actors.processes import tls
from rl_actors.processes.address import Address


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rl_actors.processes.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "address", help="tcp://HOST:PORT, or tls://HOST:PORT: the address at which other machines reach this machine"
    )
    parser.add_argument("--tls", default="", metavar="FOLDER", help="folder of certificates, for an address tls://…")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen without TLS on an interface that other machines reach; anyone who reaches it can run code as you",
    )
    given = parser.parse_args()
    try:
        address = Address.parse(given.address).numeric()
        if address.tls != bool(given.tls):
            raise ValueError(f"{address}: --tls FOLDER must be given for an address tls://, and for no other address")
        if not (given.tls or given.insecure or address.is_loopback()):
            raise ValueError(f"{address} is reachable from other machines; use tls:// with --tls FOLDER, or --insecure")
        if given.tls:
            tls.use_for_monarch(given.tls)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"waiting for runs at {address}", flush=True)
    try:
        run_worker_loop_forever(ca="trust_all_connections", address=str(address))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
