"""The audit of public libraries: releases of today and of earlier, each in an environment of its
own.

python -m benchmarks.audit_history --write
"""
