"""The scheduler's decisions, pure: no asyncio, gRPC, protobuf, torch, clocks or randomness.

Time comes in as an argument, input and output go out as values; `scheduler_svc.service` performs them. The same inputs
give the same plans.
"""
