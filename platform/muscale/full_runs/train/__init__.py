"""One rank of a full run: the Lightning module, its layout over ranks, what is done about spikes."""
