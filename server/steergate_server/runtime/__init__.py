"""The engine-independent controller: sites, row selection, lanes, gates, cache identity, report."""
