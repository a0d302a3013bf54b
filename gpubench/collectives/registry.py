"""The collectives gpubench measures, in the order of its help. A new one is one file and one line here."""

from gpubench.collectives.allgather import ALLGATHER
from gpubench.collectives.allreduce import ALLREDUCE
from gpubench.collectives.alltoall import ALLTOALL
from gpubench.collectives.broadcast import BROADCAST
from gpubench.collectives.gather import GATHER
from gpubench.collectives.record import Collective
from gpubench.collectives.reduce import REDUCE
from gpubench.collectives.reducescatter import REDUCESCATTER
from gpubench.collectives.scatter import SCATTER
from gpubench.collectives.sendrecv import SENDRECV

COLLECTIVES: tuple[Collective, ...] = (
    ALLREDUCE,
    ALLGATHER,
    REDUCESCATTER,
    BROADCAST,
    REDUCE,
    ALLTOALL,
    GATHER,
    SCATTER,
    SENDRECV,
)
