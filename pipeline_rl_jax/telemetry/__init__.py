"""What a run shows and leaves behind: metrics, spans, progress, samples, profile, summary.

Knows nothing of schedules, devices or models; takes numbers and records and writes them.
"""
