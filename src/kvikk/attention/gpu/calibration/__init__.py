"""Calibrations: the constants of the cost model by device and shape, as JSON files.

`kvikk calibrate` writes one for this machine's GPU into the user's cache folder; those of well-known devices come with
the package, beside this module. A shape that is in neither is not calibrated, and takes our own kernels.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast, get_args

from kvikk.attention.gpu.cost import DecodeShape, Programs, RouteCost, RouteName
from kvikk.errors import ConfigError
from kvikk.models.bundled import cache_folder

log = logging.getLogger(__name__)

SHIPPED: Final = Path(__file__).parent
WAY_OUT: Final = "make it again with `kvikk calibrate`, or delete it"

RouteCosts = dict[RouteName, RouteCost]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is known of a device.

    Args:
        device: its product name.
        header: how it was measured: versions, commit, date.
        shapes: constants of the routes that serve a shape.
    """

    device: str
    header: Mapping[str, Any] = field(default_factory=dict)
    shapes: dict[DecodeShape, RouteCosts] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        shapes = [
            asdict(shape) | {"routes": {route: asdict(cost) for route, cost in costs.items()}}
            for shape, costs in self.shapes.items()
        ]
        return {"device": self.device, "header": dict(self.header), "shapes": shapes}

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """From a file.

        Raises:
            ConfigError: it is no calibration.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            shapes: dict[DecodeShape, RouteCosts] = {}
            for written in content["shapes"]:
                routes = written.pop("routes")
                shapes[DecodeShape(**written)] = {_route(name): _cost(cost) for name, cost in routes.items()}
            return cls(device=content["device"], header=content["header"], shapes=shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no calibration ({error!r}): {WAY_OUT}") from error


def file_name(device: str) -> str:
    """`NVIDIA H200` is `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def user_file(device: str) -> Path:
    """Where `kvikk calibrate` keeps a device's constants."""
    return cache_folder() / "calibration" / file_name(device)


def costs_of(device: str, shape: DecodeShape) -> RouteCosts:
    """The constants of a shape: the user's own, else those that come with the package, else none.

    Raises:
        ConfigError: a file is there and is no calibration.
    """
    for path in (user_file(device), SHIPPED / file_name(device)):
        if path.is_file() and shape in (found := Calibration.read(path).shapes):
            return found[shape]
    log.info(
        "%s is not calibrated for %s: decode attention takes our own kernels; see `kvikk calibrate`", device, shape
    )
    return {}


def save(path: Path, device: str, header: Mapping[str, Any], shape: DecodeShape, costs: RouteCosts) -> None:
    """Write a shape's constants into a file, beside the other shapes that it holds.

    Raises:
        ConfigError: the file is there and is no calibration, or cannot be written.
    """
    shapes = Calibration.read(path).shapes if path.is_file() else {}
    made = Calibration(device=device, header=header, shapes=shapes | {shape: costs})
    partial = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(made.as_json(), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)  # whoever reads it meanwhile finds the old one or the new one
    except OSError as error:
        raise ConfigError(f"the calibration cannot be written to {path}: {error}") from None


def _route(name: str) -> RouteName:
    if name not in get_args(RouteName):
        raise ValueError(f"route {name!r}")
    return cast("RouteName", name)


def _cost(written: dict[str, Any]) -> RouteCost:
    return RouteCost(programs=Programs(**written.pop("programs")), **{name: float(x) for name, x in written.items()})
