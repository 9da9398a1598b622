"""Measurements that count: cold weights, graph replay, medians, ratios only inside one run, errors in the same run."""
