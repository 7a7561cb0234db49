{{/* Do containers and volumes of the user's fit beside those of the chart? A cluster would take the StatefulSet, and then make no pod. */}}

{{- define "refill.checkContainers" -}}
{{- range $list := list "initContainers" "sidecars" -}}
{{- range get $.Values $list | default list -}}
{{- if eq (toString .name) "refill" -}}
{{- fail (printf "%s: the container of the chart is called refill; call it something else" $list) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $volumes := concat (list "tmp") (include "refill.secrets" . | fromYaml | keys) -}}
{{- if .Values.pinnedDisk.enabled }}{{ $volumes = append $volumes "pinned" }}{{ end -}}
{{- range .Values.extraVolumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes: there is a volume %s already; call it something else" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "extraVolumeMounts: there is no volume %s among extraVolumes" .name) -}}
{{- end -}}
{{- if eq (trimSuffix "/" .mountPath) "/tmp" -}}
{{- fail "extraVolumeMounts: the chart mounts /tmp itself" -}}
{{- end -}}
{{- end -}}
{{- with .Values.settings.unix_socket -}}
{{- $folder := dir . -}}
{{- $isMounted := hasPrefix "/tmp/" . -}}
{{- range $.Values.extraVolumeMounts -}}
{{- $isMounted = or $isMounted (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $folder)) -}}
{{- end -}}
{{- if not $isMounted -}}
{{- fail (printf "settings.unix_socket: no volume is mounted at %s, where no other container would find it; add one to extraVolumes and extraVolumeMounts" $folder) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes makes no pod that may have less than it asks for. */}}
{{- define "refill.checkResources" -}}
{{- $requests := .Values.resources.requests -}}
{{- range $name, $limit := .Values.resources.limits -}}
{{- if hasKey $requests $name -}}
{{- $request := get $requests $name -}}
{{- if lt (include "refill.amount" $limit | float64) (include "refill.amount" $request | float64) -}}
{{- fail (printf "resources.limits.%s, %v, is below resources.requests.%s, %v" $name $limit $name $request) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of any resource, 500m, 2 or 4Gi -> a number, to be compared. */}}
{{- define "refill.amount" -}}
{{- $text := include "refill.text" . -}}
{{- $factors := dict "" 1 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
    "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{ mulf (regexFind "^[0-9.]+" $text | float64) (get $factors (regexFind "[A-Za-z]*$" $text)) }}
{{- end -}}
