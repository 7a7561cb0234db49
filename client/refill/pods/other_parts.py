"""Do all ranks read the same parts of a dataset? Each looks where the next one is.

Ranks that split a dataset differently read other jobs. Each would wait for the others in its own, until time is up. Or,
where none waits, each would read its share of another part, and validate with what the next one trains with.
"""

from __future__ import annotations

import time
from urllib.parse import quote

from refill.errors import JobConflict, RefillError
from refill.pods.answer_checks import read_as_of_a_pod
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.pod_connection import PodConnection
from refill.pods.pod_link import UNIX, checked_url
from refill.protocol.part_names import whole_of

_EVERY_SECONDS = 2.0
_SURE_SECONDS = 12.0
"""A process that was killed counts as alive for ten seconds: it may have read what this one does not."""
_ANSWER_SECONDS = 2.0
_NAMED = 3


class OtherParts:
    """What is known of the next rank, as one that reads a part sees it. Picklable.

    :param made: the jobs of all parts that this process has made; more may come.
    """

    def __init__(self, made: list[str]) -> None:
        self._made = made
        self.is_alike = False
        """Whether the next rank is known to read a part that this one has made, too."""
        self._looked_at = self._apart_since = 0.0
        self._channel: PodChannel | None = None

    def look(self, connection: PodConnection | PlannedConnection) -> None:
        """Called before this rank asks for samples, and while it waits. Raises :class:`JobConflict` when the next rank
        reads other parts only, and has for a while."""
        now, spec = time.monotonic(), connection.spec
        if self.is_alike or now - self._looked_at < _EVERY_SECONDS:
            return
        self._looked_at = now
        following = (connection.rank + 1) % spec.world_size
        try:
            reads_this, others = self._read_by(following, connection)
        except RefillError:
            return  # its home does not answer, or knows nothing of this job yet
        self.is_alike = reads_this or any(other in self._made for other in others)
        if self.is_alike or not others:
            self._apart_since = 0.0
            return
        self._apart_since = self._apart_since or now
        if now - self._apart_since >= _SURE_SECONDS:
            named = ", ".join(others[:_NAMED])
            raise JobConflict(
                f"ranks of job {whole_of(spec.name)} have made different parts of the dataset: rank {connection.rank} "
                f"reads {spec.name}, and rank {following} reads {named}. Have all ranks make the same parts: give "
                "random_split a generator with one seed, generator=torch.Generator().manual_seed(0), and Subset the "
                "same indices",
                job=spec.name,
            )

    def _read_by(self, rank: int, connection: PodConnection | PlannedConnection) -> tuple[bool, list[str]]:
        """``(whether a rank has come to this part, the others that it reads now)``."""
        if self._channel is None:
            self._channel = PodChannel(connection.credentials, _ANSWER_SECONDS)
        service, pods = connection.service_url, connection.info()["pods"]
        pod = checked_url(pods[rank % len(pods)]) if pods and not service.startswith(UNIX) else service
        if not self._channel.may_ask(pod, service):
            pod = service
        path = f"/v1/jobs/{quote(connection.spec.name, safe='')}/ranks/{rank}/parts"
        answer = self._channel.call("GET", pod, path, Wait(_ANSWER_SECONDS))
        with read_as_of_a_pod(pod):
            return bool(answer["here"]), [str(name) for name in answer["others"]]
