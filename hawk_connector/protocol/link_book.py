"""All links of one decode machine: made when first used, forgotten when they are of no use.

Which prefill ranks there are is what clients say, and prefill sides come and go, so links that nobody needs must
neither pile up nor keep new ones out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..plan.pairing import DecodeFacts
from .lease import Clock
from .link import LinkLimits, LinkState, PeerLink
from .messages import Hello

__all__ = ["LinkBook"]


class LinkBook:
    """``needed``: the addresses that something under way wants.  ``forgotten`` is told each address that is dropped.

    A link that is neither needed nor configured (``keep``) is forgotten when its peer is down or refused and nobody
    has used it for ``limits.forget_s``; past ``limits.max_links`` of them the dead before the living, and of those the
    one least recently used, makes room for a new one.
    """

    def __init__(
        self,
        epoch: str,
        facts: DecodeFacts,
        limits: LinkLimits,
        clock: Clock,
        needed: Callable[[], set[str]],
        forgotten: Callable[[str], None],
    ) -> None:
        self.links: dict[str, PeerLink] = {}
        self._epoch = epoch
        self._facts = facts
        self._limits = limits
        self._clock = clock
        self._needed = needed
        self._forgotten = forgotten
        self._kept: set[str] = set()
        # Hellos of forgotten links: a link made anew must not take a late answer to one of those for its own.
        self._sent = 0

    def keep(self, address: str) -> None:
        """This peer is configured: its link is never forgotten and counts for no limit."""
        self._kept.add(address)

    def use(self, address: str) -> PeerLink:
        """The link with ``address``, made where there is none."""
        link = self.links.get(address)
        if link is None:
            if address not in self._kept:
                self._make_room()
            link = PeerLink(address, self._epoch, self._facts, self._limits, self._clock, sent=self._sent)
            self.links[address] = link
        link.used_at = self._clock()
        return link

    def has_room(self, addresses: Iterable[str]) -> bool:
        """Whether links with all of ``addresses`` may be had at once, without dropping one that is needed."""
        busy = self._needed().intersection(self.links).union(addresses) - self._kept
        return len(busy) <= self._limits.max_links

    def unused(self, address: str) -> bool:
        """Whether nothing can come of this peer any more: forgotten, or dead and not used for ``forget_s``."""
        link = self.links.get(address)
        return link is None or (link.dead and self._clock() >= link.used_at + self._limits.forget_s)

    def tick(self) -> list[tuple[str, Hello]]:
        """Lets time pass; the (address, Hello) pairs to send."""
        now = self._clock()
        needed = self._needed()
        hellos: list[tuple[str, Hello]] = []
        for link in list(self.links.values()):
            if link.address in needed:
                link.used_at = now
            hello = link.tick()
            if link.address not in needed and link.address not in self._kept and self.unused(link.address):
                self._forget(link)  # its Hello too: said after the disconnect, it would connect once more
            elif hello is not None:
                hellos.append((link.address, hello))
        return hellos

    def _make_room(self) -> None:
        others = [link for link in self.links.values() if link.address not in self._kept]
        if len(others) < self._limits.max_links:
            return
        needed = self._needed()
        idle = [link for link in others if link.address not in needed]
        if idle:
            self._forget(min(idle, key=lambda link: (link.state is LinkState.PAIRED, link.used_at)))

    def _forget(self, link: PeerLink) -> None:
        del self.links[link.address]
        self._sent = max(self._sent, link.sent)
        self._forgotten(link.address)
