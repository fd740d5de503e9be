"""Short outputs of ``nvidia-smi`` in the forms of real machines, with serial numbers and unused sections left out."""

from __future__ import annotations

# the sections and texts of driver 535 on an A100-SXM4 node and of driver 575 (nvsmi_device_v12.dtd)
GPU = """\
	<gpu id="00000000:{bus}:00.0">
		<product_name>NVIDIA H100 80GB HBM3</product_name>
		<persistence_mode>Enabled</persistence_mode>
		<mig_mode>
			<current_mig>Disabled</current_mig>
			<pending_mig>Disabled</pending_mig>
		</mig_mode>
		<uuid>GPU-{bus}</uuid>
		<gpu_reset_status>
			<reset_required>Requested functionality has been deprecated</reset_required>
		</gpu_reset_status>
		<gpu_recovery_action>None</gpu_recovery_action>
		<pci>
			<pci_bus_id>00000000:{bus}:00.0</pci_bus_id>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>5</max_link_gen>
					<current_link_gen>5</current_link_gen>
					<device_current_link_gen>5</device_current_link_gen>
					<max_device_link_gen>5</max_device_link_gen>
					<max_host_link_gen>5</max_host_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>16x</max_link_width>
					<current_link_width>16x</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
		</pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
			<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
			<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>81559 MiB</total>
			<reserved>551 MiB</reserved>
			<used>1 MiB</used>
		</fb_memory_usage>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>0</dram_correctable>
				<dram_uncorrectable>0</dram_uncorrectable>
			</volatile>
			<aggregate>
				<dram_uncorrectable>2</dram_uncorrectable>
				<sram_threshold_exceeded>No</sram_threshold_exceeded>
			</aggregate>
		</ecc_errors>
		<retired_pages>
			<pending_retirement>N/A</pending_retirement>
		</retired_pages>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr>
			<remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>No</remapped_row_pending>
			<remapped_row_failure>No</remapped_row_failure>
		</remapped_rows>
		<fabric>
			<state>Completed</state>
			<status>Success</status>
			<health>
				<bandwidth>N/A</bandwidth>
			</health>
		</fabric>
		<processes>
		</processes>
	</gpu>
"""
BUSES = ("18", "2a", "3a", "5d")


def query(**changes: tuple[str, str]) -> str:
    """Returns the output of ``nvidia-smi -q -x`` of four healthy GPUs; ``changes`` maps ``bus_XX`` to a replacement."""
    gpus = []
    for bus in BUSES:
        old, new = changes.get(f"bus_{bus}", ("", ""))
        assert not old or old in GPU
        gpus.append(GPU.replace(old, new).replace("{bus}", bus) if old else GPU.replace("{bus}", bus))
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
    head += "\t<driver_version>575.51.02</driver_version>\n\t<attached_gpus>4</attached_gpus>\n"
    return head + "".join(gpus) + "</nvidia_smi_log>\n"


def nvlink_status(*active: int, most: int = 18) -> str:
    """Returns the output of ``nvidia-smi nvlink --status`` of GPUs with so many ``active`` links."""
    text = ""
    for index, count in enumerate(active):
        text += f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{BUSES[index]})\n"
        if count == 0:
            text += "NVML: Unable to retrieve NVLink information as all links are inActive\n"
            continue
        for link in range(most):
            text += f"\t Link {link}: {'26.562 GB/s' if link < count else '<inactive>'}\n"
    return text


# a MIG GPU of driver 535 has no remapped rows and no utilization; a Tesla V100 of driver 470 counts double-bit errors
V100 = """<?xml version="1.0" ?>
<nvidia_smi_log>
	<gpu id="00000000:D8:00.0">
		<product_name>Tesla V100-PCIE-32GB</product_name>
		<uuid>GPU-d8</uuid>
		<clocks_throttle_reasons>
			<clocks_throttle_reason_gpu_idle>Active</clocks_throttle_reason_gpu_idle>
			<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
			<clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
		</clocks_throttle_reasons>
		<pci>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>3</max_link_gen>
					<current_link_gen>1</current_link_gen>
				</pcie_gen>
				<link_widths>
					<max_link_width>16x</max_link_width>
					<current_link_width>8x</current_link_width>
				</link_widths>
			</pci_gpu_link_info>
		</pci>
		<ecc_errors>
			<volatile>
				<single_bit><total>4</total></single_bit>
				<double_bit><total>1</total></double_bit>
			</volatile>
		</ecc_errors>
		<retired_pages>
			<pending_retirement>Yes</pending_retirement>
		</retired_pages>
		<remapped_rows>N/A</remapped_rows>
	</gpu>
</nvidia_smi_log>
"""

KERNEL_LOG = """\
[    9.120000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  575.51.02  Release Build
[  220.510000] NVRM: Xid (PCI:0000:18:00): 31, pid=1896, name=python, Ch 00000008, intr 00000000. MMU Fault
[  230.510000] NVRM: Xid (PCI:0000:18:00): 43, pid=1896, name=python, Ch 00000008
[  300.100000] NVRM: Xid (PCI:0000:2a:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu
[  301.100000] NVRM: Xid (PCI:0000:2a:00): 94, pid=2211, name=python, Contained: SM (0x1). RST: No, D-RST: No
[  400.100000] NVRM: Xid (PCI:0000:3a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[  400.200000] NVRM: GPU 0000:3a:00.0: GPU has fallen off the bus.
[401.000000] NVRM: Xid (PCI:0000:3a:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
[  402.400000] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up
[  402.400100] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Severity 1 Engine instance 48 Sub-engine instance 00
[  403.400000] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout Error (First)
[  404.000000] NVRM: Xid (PCI:0000:5d:00): 149, pid=0, NETIR_LINK_EVT  Nonfatal XC0 i0 Link 08 (0x004505c6)
[  405.000000] NVRM: Xid (PCI:0000:5d:00): 999, pid=0, something new
"""
