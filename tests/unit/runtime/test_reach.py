"""Which rows of a step anything acts on, against a look at each row; and steering through a view of all rows."""

import numpy as np
import pytest
import torch

from steergate_server.graph.pools import Pool
from steergate_server.graph.tables import SiteTables
from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup
from steergate_server.runtime.reach import StepReach
from steergate_server.schema.requests import Where
from unit.runtime.world import SITES, WIDTH, controller, geometry

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(20))
def test_every_site_finds_the_rows_that_act_there(seed):
    random = np.random.default_rng(seed)
    share = (0.0, 0.1, 0.5, 0.95)[seed % 4]
    touches, slots = random.random((4, 9)) < share, random.integers(0, 9, (7, 3))
    touches[3] = True
    tables = SiteTables(4, 9, Pool(30, 5, torch.float32, CPU), ["additive"], 0, CPU)
    bias = random.integers(0, 30, (4, 9))
    tables.bias[:] = torch.from_numpy(bias)
    reach = StepReach(torch.from_numpy(touches), torch.from_numpy(slots))
    for site in range(4):
        expected = [row for row in range(7) if any(touches[site, slot] for slot in slots[row])]
        found = reach.at(site, tables, site)
        assert reach.at(site, tables, site) is found
        assert np.arange(7)[found.rows].tolist() == expected
        assert found.slots.tolist() == slots[expected].tolist()
        assert found.touched.tolist() == [[bool(touches[site, slot]) for slot in slots[row]] for row in expected]
        assert [lane.tolist() for lane in found.entries] == bias[site][slots[expected]].T.tolist()
        assert isinstance(found.rows, slice) == (len(expected) == 7)


@pytest.mark.parametrize("others", [0, 1])
def test_attenuation_at_one_site_does_not_reach_into_the_next(tmp_path, others):
    """With `others` the rows are chosen; without, they are a view of everything, and nothing may be written there."""
    random = np.random.default_rng(5)
    sites = [("post_attn", 0), ("post_block", 0), ("post_block", 1)]
    rows = {site: random.standard_normal(WIDTH).astype("f4") for site in sites}
    spool = Spool(tmp_path)
    numbers = {f"{hook}/{layer:08d}": row for (hook, layer), row in rows.items()}
    digest, _ = spool.put(StoredPayload("direction", numbers, {}), durable=False)
    vector = PlannedVector(
        algorithm="direct", digest=digest, sites=tuple(sites), where=Where(prompt="all", generation="all")
    )
    gate = PlannedGate(when="always", at="generated", scope="this_token", apply="attenuate", keep=0.25)
    plan = Plan(groups=(VectorGroup(vectors=(vector,)),), gates=(gate,))
    control = controller(spool, "in_graph")
    control.add("a", plan, [1, 2], 50)
    control.begin_step(geometry([("a", 2, 1), ("b", 0, 3)][: 1 + others]))
    for number, site in enumerate(SITES):
        if (site.hook, site.layer) in rows:
            hidden = torch.zeros(1 + 3 * others, WIDTH)
            control.steer(hidden, None, number)
            np.testing.assert_allclose(hidden[0], 0.25 * rows[site.hook, site.layer], rtol=1e-6)
            assert not hidden[1:].any()
            assert control.lanes.weight[: 1 + 3 * others, 0].tolist() == [1.0] * (1 + 3 * others)
    control.end_step()
