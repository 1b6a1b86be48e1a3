"""`measure_soak`: an engine under mixed load near its capacity for long, and whether anything fails, leaks or stays."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from aphoton import AphotonError, CompletionStream, Engine, EngineClosed, EngineDead, InvalidRequest, SamplingParams
from aphoton import SimModel as SimModel
from aphoton.cli.engine import open_engine
from aphoton.cli.figures import Spread
from aphoton.cli.memory import MEBI, Resident
from aphoton.cli.workload import Workload
