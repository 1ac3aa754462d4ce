"""A process that plays a shard on a Dask cluster, to be killed: folder, scheduler, door's port."""

import sys
from pathlib import Path

from ratchet.adapters.harness.dask_cluster import open_cluster
from ratchet.adapters.network.addresses import Listener
from tests.support.door.played_shard import AGENT, SLOW, PlayedShard


def main(folder: str, address: str, port: str) -> None:
    with (
        PlayedShard(Path(folder), AGENT, SLOW, 1, Listener(port=int(port))) as shard,
        open_cluster(address, 1) as cluster,
    ):
        shard.play(cluster.play)


if __name__ == "__main__":
    main(*sys.argv[1:])
