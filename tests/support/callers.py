"""What a test may ask of a gateway that listens on a port, wherever it runs."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.support.raw import RawClient, Response


class Caller:
    """Requests on connections of their own."""

    port: int

    def client(self) -> RawClient:
        return RawClient(self.port)

    async def ask(
        self, body: bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> Response:
        async with self.client() as client:
            return await client.ask(body, path, headers)

    async def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Response:
        async with self.client() as client:
            return await client.get(path, headers, method)

    async def metric(self, name: str, headers: dict[str, str] | None = None, **labels: str) -> float:
        """Sum of a metric's samples that have these labels, read from the page."""
        page = (await self.get("/metrics", headers)).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
