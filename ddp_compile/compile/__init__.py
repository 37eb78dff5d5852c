"""From a graph that Dynamo made to compiled code."""
