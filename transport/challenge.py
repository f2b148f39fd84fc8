"""Proof between TCP peers that both know the cluster's secret, before the first request is read.

::

    server -> client   magic (8), server nonce (32)
    client -> server   client nonce (32), HMAC-SHA256(secret, "client" | server nonce | client nonce)
    server -> client   HMAC-SHA256(secret, "server" | server nonce | client nonce)

Nonces are fresh, so a recorded exchange proves nothing, and the roles are named, so an answer cannot be
reflected. It keeps strangers out; it does not encrypt or sign what follows, which a private network must do.
"""

from __future__ import annotations

import hmac
import secrets

from ..fabric.kinds import FabricError, SpecError

MAGIC = b"KVFABRC1"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
SECRET_BYTES_MIN = 16
HANDSHAKE_TIMEOUT_S = 5.0


class ChallengeFailed(FabricError):
    """The other side does not know the secret, or is no peer of ours."""


def check_secret(secret: bytes) -> bytes:
    """Raises SpecError for a secret too short to be one."""
    if len(secret) < SECRET_BYTES_MIN:
        raise SpecError(f"secret: {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed")
    return secret


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + server_nonce + client_nonce, "sha256")


class ServerChallenge:
    """The server's half: send ``greeting``, feed the client's answer, send what ``check`` returns."""

    def __init__(self, secret: bytes) -> None:
        self._secret = check_secret(secret)
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def greeting(self) -> bytes:
        return MAGIC + self._nonce

    def check(self, answer: bytes) -> bytes:
        """The proof to send back. Raises ChallengeFailed."""
        client_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", self._nonce, client_nonce)):
            raise ChallengeFailed("the peer does not know the cluster's secret")
        return _proof(self._secret, b"server", self._nonce, client_nonce)


class ClientChallenge:
    """The client's half: feed the greeting, send what ``answer`` returns, feed the server's proof."""

    def __init__(self, secret: bytes) -> None:
        self._secret = check_secret(secret)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._server_nonce = b""

    def answer(self, greeting: bytes) -> bytes:
        """Raises ChallengeFailed for a server that is no peer of ours."""
        if greeting[: len(MAGIC)] != MAGIC:
            raise ChallengeFailed("no kvfabric server answers at this address")
        self._server_nonce = greeting[len(MAGIC) :]
        return self._nonce + _proof(self._secret, b"client", self._server_nonce, self._nonce)

    def check(self, proof: bytes) -> None:
        """Raises ChallengeFailed for a server that does not know the secret."""
        if not hmac.compare_digest(proof, _proof(self._secret, b"server", self._server_nonce, self._nonce)):
            raise ChallengeFailed("the server does not know the cluster's secret")


def door_secret(secret: bytes) -> bytes:
    """What a process's TCP door asks proof of: derived from the cluster's secret, which it does not tell.

    Clients are given it and may ask what any client may; to speak as a peer takes the secret itself.
    """
    return hmac.digest(secret, b"door", "sha256")


def peer_proof(secret: bytes, sender: str, receiver: str, incarnation: int) -> bytes:
    """What shows one life of ``receiver`` that ``sender`` is of its own fabric, on a connection of any kind.

    It proves membership to a server that the caller trusts already (a Unix socket of the same user, or TCP
    after the challenge); without a nonce it is of use to whoever saw it, so it is sent nowhere else.
    """
    fields = [part.encode() for part in ("peer", sender, receiver, str(incarnation))]
    return hmac.digest(secret, b"".join(len(f).to_bytes(4, "little") + f for f in fields), "sha256")
