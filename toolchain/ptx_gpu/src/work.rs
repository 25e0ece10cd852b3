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
    Copy {
        target: u64,
        source: u64,
        bytes: usize,
    },
}
