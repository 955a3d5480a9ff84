"""The reasons why a peer can fail; the run then continues with the other peers.

PeerFailed
├── InstallFailed   its venv could not be made
├── StartFailed     its server did not become ready
├── WrongAnswer     it answered with something else than the reference
└── LoadFailed      it answered nothing under load
"""


class PeerFailed(Exception):
    """A failure of a peer; its message is the reason in the table."""


class InstallFailed(PeerFailed):
    pass


class StartFailed(PeerFailed):
    pass


class WrongAnswer(PeerFailed):
    pass


class LoadFailed(PeerFailed):
    pass
