"""Analysis of Dynamo graphs, and surgery on them."""
