"""The least that Ray Serve and FastAPI do for a request: parse a JSON body, answer a constant."""

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve.schema import LoggingConfig

app = FastAPI()


class Body(BaseModel):
    """What `/predict` takes."""

    inputs: str
    timeout_s: float = 30.0


@serve.deployment(
    name="bare",
    max_ongoing_requests=100_000,
    ray_actor_options={"num_cpus": 0.1},
    logging_config=LoggingConfig(encoding="JSON", enable_access_log=False, log_level="WARNING"),  # as Offramp's own
)
@serve.ingress(app)
class Bare:
    """One replica, no model."""

    @app.post("/predict")
    async def predict(self, body: Body) -> dict[str, object]:
        """The shape of Offramp's answer."""
        return {"label": "yes", "score": 1.0, "exit": len(body.inputs) and 0, "request_id": ""}
