"""Q-Margin, a sparse alpha-divergence margin loss, as a head for WeSpeaker."""

__version__ = "0.1.0"
