"""Links from the report on negatives to the page of `heron serve`."""

from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from heron.config.errors import RetrievalError
from heron.retrieval.filters import quoted

ADDRESS = "http://127.0.0.1:8000/"  # of `heron serve`, by default


@dataclass(frozen=True)
class PageLinks:
    """Addresses of views of the page of `heron serve` for the report's samples.

    Raises a RetrievalError if the address is not that of a web page.
    """

    address: str = ADDRESS

    def __post_init__(self) -> None:
        """Refuses what a browser would not open as a page."""
        try:
            scheme = urlsplit(self.address).scheme
        except ValueError:  # malformed, such as half of an IPv6 address
            scheme = ""
        if scheme not in ("http", "https"):
            raise RetrievalError(
                f"'{self.address}' is no address of a page; expected one such as {ADDRESS}; give "
                "--page what `heron serve` prints"
            )

    def sample(self, key: str, relation: str) -> str:
        """Returns the address that shows a sample with its `hard` or `false` negatives."""
        return self._with(key=key, relation=relation)

    def confused(self, anchor: str, neighbour: str) -> str:
        """Returns the address of a random sample with one label only, beside those with the other.

        If both labels are the same, it is shown beside others that have it.
        """
        if anchor == neighbour:
            return self._with(among=quoted(anchor), where=quoted(anchor))
        pair = quoted(anchor), quoted(neighbour)
        return self._with(
            among=f"{pair[0]} and not {pair[1]}", where=f"{pair[1]} and not {pair[0]}"
        )

    def _with(self, **query: str) -> str:
        return f"{self.address}{'&' if '?' in self.address else '?'}{urlencode(query)}"
