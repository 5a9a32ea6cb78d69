"""Steering algorithms: the extension API, the registry, and one file for each algorithm."""

from steergate_server.algorithms import attention_add as attention_add
from steergate_server.algorithms import clamp as clamp
from steergate_server.algorithms import concept_replace as concept_replace
from steergate_server.algorithms import direct as direct
from steergate_server.algorithms import erase as erase
from steergate_server.algorithms import linear as linear
from steergate_server.algorithms import lm_steer as lm_steer
from steergate_server.algorithms import loreft as loreft
from steergate_server.algorithms import moe_router as moe_router
from steergate_server.algorithms import replace as replace
