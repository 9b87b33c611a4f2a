//! What a client decides, without I/O: each machine is `step(event, now) -> what to do`, so that it can be explored
//! exhaustively. The async code in [`acquire`](crate::acquire) and [`renewal`](crate::renewal) only drives them.

pub(crate) mod acquire;
pub(crate) mod renewal;

use std::time::Duration;

/// Spreads retries: a random share of a bound that doubles, up to a limit ("full jitter").
///
/// # Source
/// M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog (2015).
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    bound: Duration,
    limit: Duration,
    state: u64,
}

impl Backoff {
    pub(crate) fn new(first: Duration, limit: Duration, seed: u64) -> Self {
        Self { bound: first.min(limit), limit, state: seed }
    }

    /// Returns the next pause: between a tenth of the bound and the bound.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.bound.mul_f64(0.1 + 0.9 * self.random());
        self.bound = (self.bound * 2).min(self.limit);
        pause
    }

    // SplitMix64: good enough to spread, and a seed replays it.
    fn random(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
