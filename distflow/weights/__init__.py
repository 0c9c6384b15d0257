"""Policy weights by version: `publish` on the training side, `fetch` on the generating side, behind `WeightLink`."""
