"""Pictures of a real swarm's dashboard: `python -m tests.dashboard.pictures FOLDER`.

Three workers train two blocks, an attacker is refused, a gateway serves an earlier checkpoint of the same shape.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

from blocktrain.config import Recipe
from blocktrain.coordinator.main import bind
from blocktrain.data.corpora import load_corpus
from blocktrain.serving.gateway import GatewayConfig
from blocktrain.serving.local_engine import LocalEngine
from blocktrain.serving.main_gateway import background_gateway
from tests.coordinator.peer import Refused
from tests.dashboard.kit import (
    Attacker,
    dashboard_recipe,
    find_chromium,
    opened_browser,
    running_swarm,
    watched,
)
from tests.end_to_end.swarm_kit import until
