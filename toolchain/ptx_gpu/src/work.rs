//! Work that streams perform and graphs repeat.

use ptx_run::Launch;

use crate::gpu::Function;

#[derive(Clone)]
pub enum Work {
    Launch {
        function: Function,
        launch: Launch,
        parameters: Vec<u8>,
    },
    Write {
        target: u64,
        bytes: Vec<u8>,
    },
    /// From the host's memory as it is when the work is done: a graph reads it anew at each launch.
    Fetch {
        target: u64,
        source: usize,
        bytes: usize,
    },
    Copy {
        target: u64,
        source: u64,
        bytes: usize,
    },
}
