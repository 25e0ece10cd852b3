//! Indices of keys that a run is given, instead of the plan's page ids.

use super::{RunTensors, Workspace, launch_plan::GroupLaunch};
use crate::{Error, checks::check_extent, tensor::ShapeError};

/// Checks that indices are given where the plan needs them, that they match its keys, and that its kernels read keys by
/// indices.
pub(super) fn check_indices(workspace: &Workspace, tensors: &RunTensors<'_>) -> Result<(), Error> {
    let Some(indices) = tensors.indices else {
        return match workspace.launch_plan.indices {
            Some(keys) if keys > 0 => Err(ShapeError::ChosenOnDevice { part: 0 }.into()),
            _ => Ok(()),
        };
    };
    let refused = |asked: String| Error::NoInstance {
        kernel: "attention",
        asked,
        there: "latent keys in F8E4M3, without a window, for plans of Batch::of_top_k in a workspace without a launch set",
    };
    indices.check_address("the indices", 4)?;
    let spec = &workspace.spec;
    let reads = |launch: &GroupLaunch| {
        let row = launch.key.kernel.info();
        row.latent && row.cache.is_some()
    };
    if let Some(launch) = workspace
        .launch_plan
        .launches
        .iter()
        .find(|launch| !reads(launch))
    {
        return Err(refused(format!("keys by indices in {}", launch.key.kernel)));
    }
    if let Some(window) = spec.variant.window_left {
        return Err(refused(format!(
            "keys by indices with a window of {window}"
        )));
    }
    if workspace.captured() {
        return Err(refused("keys by indices with a launch set".into()));
    }
    let Some(expected) = workspace.launch_plan.indices else {
        return Err(refused(
            "keys by indices for a plan that names its keys".into(),
        ));
    };
    let (got, expected) = (indices.len, expected as usize);
    check_extent("the indices", "entries", got, expected, "the plan has keys")
}
